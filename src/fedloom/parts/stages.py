"""Stages: several methods one after another."""

from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, Method, algorithms, components
from fedloom.algorithm.records import Message, Plan, Replies, Specs, TensorSpec, server_model
from fedloom.algorithms.statistics import divided
from fedloom.common.errors import InvalidValue
from fedloom.common.expression import show
from fedloom.common.fields import Count, Probability
from fedloom.common.round import Round
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part

HELD_OUT_LOSS = "@held_out_loss"
"""Name in a reply of the loss on the client's held-out samples."""

HELD_OUT = 0.1
"""Share of a client's samples that are held out in an `auto` stage."""

Stage = tuple[Method, int | Literal["auto"] | None]
"""A method and its last round: a number, "auto", or None for the end of the run."""


@algorithms.register("stages")
class Stages(Part):
    """Several methods one after another: `stages(fedavg:100, fedmr)` is two-stage FedMR-100.

    The number after a method's colon is its last round; the next method starts from the global
    model of that round. `stages(fedavg:auto, fedmr)` lets the run choose: an `auto` stage ends when
    the mean held-out loss over the last `patience` rounds is not lower, by the share `improvement`,
    than over the same number of rounds before. In such a stage each client holds out a tenth of its
    training samples (the same in every round), trains on the others, and returns the loss of the
    received model on the tenth. Source: FedMR, section 4.3 (two-stage training).
    Use it to learn a coarse model fast by averaging and finish it by recombination, or to change
    between any methods.

    Args:
        stages: Methods with their last rounds; the last method runs to the end.
        patience: Number of rounds in each mean of held-out losses.
        improvement: Smallest relative decrease of this mean that continues the stage.
    """

    method: Method = field(init=False, repr=False, compare=False)  # unused: a stage is in `stages`
    stages: list[Stage]
    patience: Count = 5
    improvement: Probability = 0.01

    variadic: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("one download", "whole models")

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = [end for _, end in self.stages]
        if not ends or None in ends[:-1]:
            example = "stages(fedavg:100, fedmr)"
            raise InvalidValue(
                f"stages needs methods, each but the last with its last round: {example}"
            )
        if ends[-1] == "auto":
            raise InvalidValue(
                "stages: the last method runs to the end of the run. Remove its :auto"
            )
        nested = [
            c for method in self._inner() for c in components(method) if isinstance(c, Stages)
        ]
        if self.automatic and any(stages.automatic for stages in nested):
            raise InvalidValue("stages: only one of nested stages may end by :auto")
        rounds = [0, *(end for end in ends if isinstance(end, int))]
        if rounds != sorted(set(rounds)):
            given = ", ".join(map(str, rounds[1:]))
            raise InvalidValue(
                f"stages: last rounds must start at 1 or later and increase, not {given}"
            )

    def __str__(self) -> str:
        texts = [str(method) if end is None else f"{method}:{end}" for method, end in self.stages]
        if self.patience != 5:
            texts.append(f"patience={show(self.patience)}")
        if self.improvement != 0.01:
            texts.append(f"improvement={show(self.improvement)}")
        return f"stages({', '.join(texts)})"

    def _inner(self) -> list[Method]:
        return [method for method, _ in self.stages]

    def _leading(self) -> list[tuple[int, Method]]:
        if not self.state:
            return []
        leading = int(self.state["stage"])
        return [(leading, self.stages[leading][0])]

    @property
    def facts(self) -> Facts:
        return Facts(fits_once=False, foreseeable=not self.automatic)

    @property
    def automatic(self) -> bool:
        """True if the run chooses the end of some stage."""
        return any(end == "auto" for _, end in self.stages)

    def waits(self, stage: int) -> bool:
        """Return True if a stage ends when its loss stops improving."""
        return self.stages[stage][1] == "auto"

    def stage_of(self, number: int, since: int = 0) -> int:
        """Return the first stage from `since` that lasts until round `number`, or else the last
        stage.

        Args:
            number: The round.
            since: Number of the first stage to consider.

        Returns:
            Number of the stage, from 0.
        """
        last = len(self.stages) - 1
        for stage in range(since, last):
            end = self.stages[stage][1]
            if not isinstance(end, int) or number <= end:
                return stage
        return last

    def first_round(self, stage: int) -> int | None:
        """Return the first round of a stage, or None if the run chooses it."""
        end = self.stages[stage - 1][1] if stage else 0
        return end + 1 if isinstance(end, int) else None

    def begin(self, stage: int, initial: Tensor | None = None, first_round: int = 1) -> None:
        """Create the state at the beginning of a stage.

        Args:
            stage: Number of the stage.
            initial: Initial model of the stage, `[P]`, if it differs from the run's.
            first_round: First round of the stage.
        """
        self.state = {"stage": torch.tensor([stage])}
        if self.automatic:
            self.state["losses"] = torch.empty(0, dtype=torch.float64)
        if initial is not None:
            self.state |= {"initial": initial, "first_round": torch.tensor([first_round])}

    def forget(self) -> None:
        """Drop the state of all stages except the present one."""
        for stage, (method, _) in enumerate(self.stages):
            if self.state and stage != int(self.state["stage"]):
                for component in components(method):
                    component.state = {}

    def successor(self, number: int) -> int:
        """Return the stage of the round after `number`. Stages with an earlier last round are
        skipped.
        """
        stage = int(self.state["stage"])
        over = self.waits(stage) and has_stopped_improving(
            self.state["losses"], self.patience, self.improvement
        )
        return self.stage_of(number + 1, stage + over)

    # --- hooks in an `auto` stage; `Stages` is a part of the pipeline only then ---

    def setup(self, plan: Plan, inner: Inner) -> None:
        self._require_plan(plan)

    def expects(self, round: Round, specs: Specs) -> Specs:
        return {**specs, HELD_OUT_LOSS: TensorSpec((), self.plan.layout.dtype)}

    def train(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        held_out, training = divided(
            cohort, "held_out", lambda count: max(1, round(HELD_OUT * count))
        )
        loss = held_out.loss(server_model(inbox))
        reply = inner.train(training, inbox)
        return reply | {HELD_OUT_LOSS: loss.to(inbox["model"].dtype)}

    def rewrite(self, round: Round, replies: Replies) -> Replies:
        if len(replies):
            loss = weighted_mean(replies[HELD_OUT_LOSS].double(), replies.weights)
            losses = torch.cat([self.state["losses"], loss.reshape(1).cpu()])
            self.state["losses"] = losses[-2 * self.patience :]
        matrices = {name: rows for name, rows in replies.matrices.items() if name != HELD_OUT_LOSS}
        return replies.with_matrices(matrices)


def has_stopped_improving(losses: Tensor, patience: int, improvement: float) -> bool:
    """Return True if the mean of the last losses is not sufficiently lower than the mean before.

    Args:
        losses: Losses by round.
        patience: Number of rounds in each mean.
        improvement: Required relative decrease.

    Returns:
        False while there are fewer than 2 `patience` losses.
    """
    if len(losses) < 2 * patience:
        return False
    older, newer = losses[-2 * patience :].chunk(2)
    return bool(newer.mean() >= (1 - improvement) * older.mean())


def stages_in(method: Method) -> Iterator[Stages]:
    """Yield all `Stages` in an expression."""
    return (component for component in components(method) if isinstance(component, Stages))
