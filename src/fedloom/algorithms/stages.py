"""Stages: one method after another on the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import (
    AggregatedReplies,
    Algorithm,
    AnyClient,
    Message,
    Plan,
    Replies,
    Selection,
    algorithms,
    describe,
    server_model,
)
from fedloom.config.fields import Count, Probability
from fedloom.data.dataset import Samples
from fedloom.errors import InvalidValue, quoted, suggestion
from fedloom.flat.layout import Unit
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort
from fedloom.round import Round

HELD_OUT = 0.1
"""Share of its samples that a client keeps back in a stage that ends by itself."""

Stage = tuple[Algorithm, int | str | None]
"""A method and its last round: a number, "auto", or None for the end of the run."""


@algorithms.register("stages")
@dataclass
class Stages(Algorithm):
    """Several methods in turn: `stages(fedavg:100, fedmr)` is two-stage FedMR-100.

    The number after a method's colon is its last round; the next method starts from the global model of that round.
    Source: FedMR, section 4.3 (two-stage training).

    `stages(fedavg:auto, fedmr)` lets the run choose: a stage marked `auto` lasts until the held-out loss of the model that it
    sends stops improving, that is until the mean over the last `patience` rounds is not lower, by the share `improvement`, than
    the mean over the `patience` rounds before. The loss never sees the test set: in such a stage each client keeps back a tenth
    of its training samples (the same ones in every round), trains on the others, and returns the loss on those kept back of the
    model that it received; the server takes the mean weighted as replies are. Afterwards clients train on all their samples
    again.
    Use it to let averaging learn the coarse model fast and recombination finish it, or to hand over between any two
    methods.
    """

    stages: list[Stage]
    patience: Count = 5
    improvement: Probability = 0.01

    wraps: ClassVar[tuple[str, ...]] = ("stages",)
    variadic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        lasts = [last for _, last in self.stages]
        if not lasts:
            raise InvalidValue("stages needs at least one method, such as stages(fedavg:100, fedmr)")
        if None in lasts[:-1]:
            raise InvalidValue(
                "stages: every method but the last needs its last round, such as stages(fedavg:100, fedmr)"
            )
        for last in lasts:
            if isinstance(last, str) and last != "auto":
                raise InvalidValue(
                    f"stages: a last round is a number or auto, not {quoted(last)}{suggestion(last, ['auto'])}"
                )
        if lasts[-1] == "auto":
            raise InvalidValue("stages: the last method goes on to the end of the run, so it takes no :auto")
        known = [0, *(last for last in lasts if isinstance(last, int))]
        if known != sorted(set(known)):
            raise InvalidValue(f"stages: last rounds must grow from 1 on, not {', '.join(map(str, known[1:]))}")

    @property
    def automatic(self) -> bool:
        """Whether the run chooses when some method ends."""
        return any(last == "auto" for _, last in self.stages)

    @property
    def scheduled(self) -> bool:
        return not self.automatic and super().scheduled

    @property
    def foreseeable(self) -> bool:
        return not self.automatic and super().foreseeable

    @property
    def anonymous_replies(self) -> bool:
        return all(method.anonymous_replies for method in self.inner())

    @property
    def personal(self) -> bool:
        return self._current.personal

    def active(self, number: int) -> Iterator[Algorithm]:
        yield self
        yield from self._leading(number).active(number)

    # --- the server half: the state is the number of the stage and, where the run chooses, its last held-out losses ---

    def setup(self, plan: Plan) -> None:
        self.plan, self.state = plan, self._at(0)
        for method in self.inner():
            method.setup(plan)
            if self.automatic and method.expects(plan.opening()).get("model") != (plan.layout.size,):
                raise InvalidValue(
                    f"stages: clients of {describe(method)} do not return whole models, which staging by :auto needs"
                )

    def _at(self, stage: int) -> dict[str, Tensor]:
        """The state when a stage begins."""
        state = {"stage": torch.tensor([stage])}
        return state | {"losses": torch.empty(0, dtype=torch.float64)} if self.automatic else state

    @property
    def _current(self) -> Algorithm:
        """The method of the round in progress, or, between two rounds, of the next one."""
        return self.stages[int(self.state["stage"])][0]

    def _leading(self, number: int) -> Algorithm:
        """The method of round `number`; where the run chooses, the current one."""
        return self._current if self.automatic else self.stages[self._stage_of(number)][0]

    def _stage_of(self, number: int) -> int:
        """The first stage that lasts until round `number`; else the last one."""
        return next((k for k, (_, last) in enumerate(self.stages) if _lasts(last, number)), len(self.stages) - 1)

    @property
    def _waits(self) -> bool:
        """Whether the current stage ends when its loss stops improving."""
        return self.stages[int(self.state["stage"])][1] == "auto"

    def select(self, round: Round) -> Selection:
        return self._leading(round.number).select(round)

    def send(self, round: Round) -> Message:
        return self._with_stage(self._current.send(round))

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return self._with_stage(self._current.deploy(round, clients))

    def _with_stage(self, message: Message) -> Message:
        return message | {"stage": self.state["stage"].unsqueeze(0)} if self.automatic else message

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        expected = dict(self._current.expects(round))
        return expected | {"held_out_loss": ()} if self._waits else expected

    def returns_whole(self, round: Round) -> bool:
        return self._current.returns_whole(round)

    def receive(self, round: Round, replies: Replies) -> None:
        if self._waits:
            loss = weighted_mean(replies["held_out_loss"].double(), replies.weights)
            self.state["losses"] = torch.cat([self.state["losses"], loss.reshape(1).cpu()])[-2 * self.patience :]
            rest = {name: tensor for name, tensor in replies.tensors.items() if name != "held_out_loss"}
            replies = replace(replies, tensors=rest)
        self._current.receive(round, replies)

    @property
    def folds(self) -> bool:
        return not self._waits and self._current.folds and type(self).receive is Stages.receive

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        return self._current.fold(round, replies)

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        self._current.update(round, aggregate)

    def finish(self, round: Round) -> None:
        self._current.finish(round)
        stage, end = int(self.state["stage"]), len(self.stages) - 1
        over = self._waits and has_stopped_improving(self.state["losses"], self.patience, self.improvement)
        # A stage whose last round went by while another waited is left out.
        following = (k for k in range(stage + over, end) if _lasts(self.stages[k][1], round.number + 1))
        if (after := next(following, end)) != stage:
            self.stages[after][0].setup(self.plan.starting_from(self._current.model()))
            self.state = self._at(after)

    def model(self) -> Tensor:
        return self._current.model()

    def diagnose(self) -> dict[str, float]:
        stage = {"stage": float(self.state["stage"])} if self.automatic else {}
        return self._current.diagnose() | stage

    # --- the client half: the server sends the stage where the run chooses it ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        (method, last), rest = self._told(cohort, inbox)
        if last != "auto":
            return method.train(cohort, rest)
        loss = cohort.subset(held_out, "held_out", lasting=True).loss(server_model(inbox))
        reply = method.train(cohort.subset(not_held_out, "held_out", lasting=True), rest)
        return reply | {"held_out_loss": loss.to(inbox["model"].dtype)}

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        (method, _), rest = self._told(cohort, inbox)
        return method.personalise(cohort, rest)

    def _told(self, cohort: Cohort, inbox: Message) -> tuple[Stage, Message]:
        """The stage that a client is in, and the message without it."""
        stage = int(inbox["stage"].max()) if self.automatic else self._stage_of(cohort.round.number)
        return self.stages[stage], {name: rows for name, rows in inbox.items() if name != "stage"}

    def travels(self, cohort: Cohort | AnyClient) -> Unit:
        if self.automatic:
            return (slice(0, cohort.layout.size),)
        return self.stages[self._stage_of(cohort.round.number)][0].travels(cohort)

    def complete(self, cohort: Cohort, model: Tensor) -> Tensor:
        return model if self.automatic else self.stages[self._stage_of(cohort.round.number)][0].complete(cohort, model)


def has_stopped_improving(losses: Tensor, patience: int, improvement: float) -> bool:
    """Whether the mean of the last `patience` of the `losses` fails to be lower than that of the `patience` before by the share
    `improvement`; False while there are fewer than twice as many."""
    if len(losses) < 2 * patience:
        return False
    older, newer = losses[-2 * patience :].chunk(2)
    return bool(newer.mean() >= (1 - improvement) * older.mean())


def _lasts(last: int | str | None, number: int) -> bool:
    """Whether a stage with this last round may contain round `number`."""
    return not isinstance(last, int) or number <= last


def _split(samples: Samples, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(samples), generator=generator).to(samples.labels.device)
    kept = max(1, round(HELD_OUT * len(samples)))
    return order[:kept], order[kept:]


def held_out(samples: Samples, generator: torch.Generator) -> Samples:
    """The samples that a client keeps back: a tenth, one at least."""
    return samples[_split(samples, generator)[0]]


def not_held_out(samples: Samples, generator: torch.Generator) -> Samples:
    """The other samples; a client with a single one trains on it all the same."""
    rest = _split(samples, generator)[1]
    return samples[rest] if len(rest) else samples
