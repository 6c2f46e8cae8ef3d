"""The course of a run: the pipeline of each round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.algorithm.method import Method, restore_state, state_of
from fedloom.algorithm.records import Message, Plan
from fedloom.common.errors import CheckpointError
from fedloom.parts.hooks import Part
from fedloom.parts.pipeline import STAGE, Pipeline, Watch
from fedloom.parts.requirements import (
    require_combination,
    require_facts,
    require_stages,
    require_units,
)
from fedloom.parts.stages import Stages, stages_in

LATER_STAGE = 2
"""Used as the first round of a later stage if it is unknown."""

Choose = Callable[[Stages], int]
"""Returns the present stage of `Stages`."""


def flatten(method: Method, choose: Choose, number: int = 0) -> Pipeline:
    """Return the pipeline of an expression.

    `Stages` are a part of the pipeline only in an `auto` stage, since clients then return a loss.

    Args:
        method: The expression.
        choose: Returns the present stage of each `Stages`.
        number: Number of the round.

    Returns:
        The pipeline, with the parts from the outermost to the innermost.
    """
    parts: list[Part] = []
    stage = None
    while not isinstance(method, Algorithm):
        if isinstance(method, Stages):
            leading = choose(method)
            if method.waits(leading):
                parts.append(method)
            if method.automatic:
                stage = leading, len(parts)
            method = method.stages[leading][0]
        else:
            assert isinstance(method, Part), f"{method} is neither an algorithm nor a part"
            parts.append(method)
            method = method.method
    return Pipeline(method, parts, stage, number)


def pipelines(method: Method) -> Iterator[Pipeline]:
    """Yield the pipelines of all stages, starting with the first."""
    for chosen in _choices(method):
        yield flatten(method, partial(_chosen_stage, chosen))


def _chosen_stage(chosen: Mapping[int, int], stages: Stages) -> int:
    return chosen[id(stages)]


def _choices(method: Method) -> Iterator[dict[int, int]]:
    """Yield the present stage of each `Stages`, by its id, for all pipelines."""
    if isinstance(method, Algorithm):
        yield {}
    elif isinstance(method, Stages):
        for k, (inner, _) in enumerate(method.stages):
            for chosen in _choices(inner):
                yield {id(method): k, **chosen}
    else:
        assert isinstance(method, Part), f"{method} is neither an algorithm nor a part"
        yield from _choices(method.method)


def require_fitting(method: Method) -> None:
    """Raise `InvalidValue` unless the parts of an expression fit each other and the algorithm in
    all stages.
    """
    all_pipelines = list(pipelines(method))
    for pipeline in all_pipelines:
        require_facts(pipeline)
    require_stages(method, all_pipelines)


def client_pipeline(method: Method, number: int, inbox: Message) -> Pipeline:
    """Return the pipeline of a round at a site.

    Args:
        method: The expression.
        number: Number of the round.
        inbox: The server's message. It contains the stage if the run chooses it.

    Returns:
        The pipeline, with the plans of later stages set to their first round.
    """
    first_rounds: dict[int, int] = {}

    def choose(stages: Stages) -> int:
        leading = stages.stage_of(number)
        first_round = stages.first_round(leading)
        if stages.automatic:
            leading, first_round = inbox[STAGE].flatten().tolist()
        first_rounds[id(stages)] = first_round or 1
        return leading

    pipeline = flatten(method, choose, number)
    for stages in stages_in(method):
        if first_rounds.get(id(stages), 1) > 1:
            inside = flatten(stages.stages[choose(stages)][0], choose)
            for component in inside.components():
                if "plan" in vars(component):  # otherwise the method was not set up
                    first_round = max(component.plan.first_round, first_rounds[id(stages)])
                    component.plan = replace(component.plan, first_round=first_round)
    return pipeline


class Course:
    """The pipelines of a run by round, and their state.

    Parts around stages are the same objects in all stages, so their state persists. A stage is set
    up when it begins, from the global model of the stage before. It has no state before and after.

    Attributes:
        method: The expression.
        watch: Observes the work of clients in this process.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.watch: Watch | None = None
        self._made: dict[int, Pipeline] = {}  # pipelines of the present stage by round
        self._has_stages = any(stages_in(method))

    def setup(self, plan: Plan) -> None:
        """Set up the first stage.

        Raises:
            InvalidValue: If the parts of any stage do not fit together.
        """
        self.plan = plan
        self._made = {}
        require_fitting(self.method)
        all_pipelines = list(pipelines(self.method))
        for pipeline in all_pipelines:
            pipeline.algorithm.setup(plan)
            for part in pipeline.parts:
                part.plan = plan  # `expects` can read it before the part is set up
            require_combination(pipeline)
        require_units(self.method, all_pipelines)
        done: set[int] = set()
        for pipeline in all_pipelines:
            for part in reversed(pipeline.parts):
                if id(part) not in done:
                    done.add(id(part))
                    part.setup(plan, pipeline.inside(part))
        for stages in stages_in(self.method):
            stages.begin(0)
        for stages in stages_in(self.method):
            stages.forget()

    def at(self, number: int) -> Pipeline:
        """Return the pipeline of a round. If the run chooses stages, it is the pipeline of the
        present stage.
        """
        if not self._has_stages:
            number = 0  # all rounds have one pipeline
        if number not in self._made:
            self._made[number] = _pipeline_of(self.method, number)
        pipeline = self._made[number]
        pipeline.watch = self.watch
        return pipeline

    def next(self, number: int) -> None:
        """Begin the stage of the round after `number`, if it differs from the present stage."""
        if not self._has_stages:
            return
        self._made = {}
        for stages in reversed(self._leading_stages()):
            successor = stages.successor(number)
            if successor != _present_stage(stages):
                model = self._present().model().clone()
                stages.begin(successor, model, number + 1)
                for nested in stages_in(stages.stages[successor][0]):
                    nested.begin(nested.stage_of(number + 1))
                stages.forget()
                self._set_up_stage(stages)

    def state(self) -> dict[str, Tensor]:
        """Return the state of all components by path."""
        return state_of(self.method)

    def require_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise `CheckpointError` for a saved state of another version. Call it after `setup`."""
        needed = set() if any(stages_in(self.method)) else self.state().keys()
        if missing := sorted(needed - state.keys()):
            reason = (
                f"has no {missing[0]!r}: another version of fedloom wrote it; use another folder"
            )
            raise CheckpointError(f"the state of {self.method} {reason}")

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned."""
        self._made = {}
        restore_state(self.method, state)
        for stages in self._leading_stages():
            stages.forget()
            if _present_stage(stages):
                self._set_up_stage(stages)
                restore_state(self.method, state)

    def _present(self) -> Pipeline:
        return flatten(self.method, _present_stage)

    def _leading_stages(self) -> list[Stages]:
        """Return the `Stages` around the present algorithm, outermost first."""
        leading: list[Stages] = []

        def choose(stages: Stages) -> int:
            leading.append(stages)
            return _present_stage(stages)

        flatten(self.method, choose)
        return leading

    def _set_up_stage(self, stages: Stages) -> None:
        """Set up the present stage of `stages` and its components."""
        plan = self.plan
        for outer in self._leading_stages():
            if _present_stage(outer):
                # Checkpoints of earlier versions do not contain the start of the stage.
                known = outer.first_round(_present_stage(outer)) or LATER_STAGE
                first_round = int(outer.state.get("first_round", max(plan.first_round, known)))
                initial = outer.state.get("initial", plan.initial)
                plan = replace(plan, initial=initial, first_round=first_round)
        pipeline = self._present()
        around = {id(part) for part in flatten(stages, _present_stage).parts}
        inside = [part for part in pipeline.parts if id(part) in around]
        states = {id(nested): nested.state for nested in stages_in(stages)}
        _set_up(pipeline, inside, plan)
        for nested in stages_in(stages):
            nested.state = states[id(nested)]


def _pipeline_of(method: Method, number: int) -> Pipeline:
    """Return the pipeline of a round. It has no reference to the course, so that a run is freed at
    once.
    """

    def choose(stages: Stages) -> int:
        return _present_stage(stages) if stages.automatic else stages.stage_of(number)

    pipeline = flatten(method, choose, number)
    if number:
        pipeline.following = partial(_pipeline_of, method)
    return pipeline


def _present_stage(stages: Stages) -> int:
    return int(stages.state["stage"])


def _set_up(pipeline: Pipeline, parts: Sequence[Part], plan: Plan) -> None:
    """Set up the algorithm of a pipeline and the given parts, innermost first."""
    pipeline.algorithm.setup(plan)
    for part in reversed(parts):
        part.setup(plan, pipeline.inside(part))
