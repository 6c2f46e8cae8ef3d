"""Stages: several methods in turn."""

from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithms.statistics import divided
from fedloom.config.expression import show
from fedloom.config.fields import Count, Probability
from fedloom.errors import InvalidValue
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort
from fedloom.method import Facts, Method, algorithms, components
from fedloom.parts.hooks import Inner, Part
from fedloom.records import Message, Plan, Replies, Specs, TensorSpec, server_model
from fedloom.round import Round

HELD_OUT_LOSS = "@held_out_loss"
"""Name in a reply of the loss on the client's held-out samples."""

HELD_OUT = 0.1
"""Share of a client's samples that are held out in a stage that ends by itself."""

Stage = tuple[Method, int | Literal["auto"] | None]
"""A method and its last round: a number, "auto", or None for the end of the run."""


@algorithms.register("stages")
class Stages(Part):
    """Several methods in turn: `stages(fedavg:100, fedmr)` is two-stage FedMR-100.

    The number after a method's colon is its last round; the next method starts from the global
    model of that round. `stages(fedavg:auto, fedmr)` lets the run choose: an `auto` stage ends when
    the mean held-out loss of the models that it sends is not lower, by the share `improvement`,
    over the last `patience` rounds than over as many before. In such a stage each client holds out
    a tenth of its training samples (the same in every round), trains on the others, and returns the
    loss of the received model on the tenth. Source: FedMR, section 4.3 (two-stage training).
    Use it to let averaging learn the coarse model fast and recombination finish it, or to change
    between any methods.

    Args:
        stages: Methods with their last rounds; the last method runs to the end.
        patience: Rounds of a mean of held-out losses.
        improvement: Least relative decrease of that mean.
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
                f"stages needs methods, all but the last with last rounds: {example}"
            )
        if ends[-1] == "auto":
            raise InvalidValue(
                "stages: the last method runs to the end of the run, so it takes no :auto"
            )
        nested = [
            c for method in self._inner() for c in components(method) if isinstance(c, Stages)
        ]
        if self.automatic and any(stages.automatic for stages in nested):
            raise InvalidValue("stages: of stages inside each other only one may end by :auto")
        rounds = [0, *(end for end in ends if isinstance(end, int))]
        if rounds != sorted(set(rounds)):
            given = ", ".join(map(str, rounds[1:]))
            raise InvalidValue(f"stages: last rounds must grow from 1 on, not {given}")

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
        """True if the run chooses when some stage ends."""
        return any(end == "auto" for _, end in self.stages)

    def waits(self, stage: int) -> bool:
        """Return True if a stage ends when its loss stops improving."""
        return self.stages[stage][1] == "auto"

    def stage_of(self, number: int, since: int = 0) -> int:
        """Return the first stage, from `since` on, that lasts until round `number`; else the last
        one.
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
        """Make the state at the beginning of a stage.

        Args:
            stage: Its number.
            initial: The model that it starts from, `[P]`, if another one than that of the run.
            first_round: Its first round.
        """
        self.state = {"stage": torch.tensor([stage])}
        if self.automatic:
            self.state["losses"] = torch.empty(0, dtype=torch.float64)
        if initial is not None:
            self.state |= {"initial": initial, "first_round": torch.tensor([first_round])}

    def forget(self) -> None:
        """Drop the state of all stages but the present one."""
        for stage, (method, _) in enumerate(self.stages):
            if self.state and stage != int(self.state["stage"]):
                for component in components(method):
                    component.state = {}

    def successor(self, number: int) -> int:
        """Return the stage of the round after `number`. A stage whose last round has passed is
        skipped.
        """
        stage = int(self.state["stage"])
        over = self.waits(stage) and has_stopped_improving(
            self.state["losses"], self.patience, self.improvement
        )
        return self.stage_of(number + 1, stage + over)

    # --- hooks of a stage that ends by itself; it is a part of the pipeline only then ---

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
        kept = {name: rows for name, rows in replies.matrices.items() if name != HELD_OUT_LOSS}
        return replies.with_matrices(kept)


def has_stopped_improving(losses: Tensor, patience: int, improvement: float) -> bool:
    """Return True if the mean of the last `patience` losses is not lower, by the share
    `improvement`, than before.
    """
    if len(losses) < 2 * patience:
        return False
    older, newer = losses[-2 * patience :].chunk(2)
    return bool(newer.mean() >= (1 - improvement) * older.mean())


def stages_in(method: Method) -> Iterator[Stages]:
    """Yield all stages in an expression."""
    return (component for component in components(method) if isinstance(component, Stages))
