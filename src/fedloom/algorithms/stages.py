"""Stages: one method after another on the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Plan, Replies, Selection, algorithms, server_model
from fedloom.config.fields import Count, Probability
from fedloom.data.dataset import Samples
from fedloom.errors import InvalidValue, suggestion
from fedloom.flat.layout import Unit
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort
from fedloom.round import Round

HELD_OUT = 0.1
"""Share of its samples that a client keeps back while a stage waits for its end."""


@algorithms.register("stages")
@dataclass
class Stages(Algorithm):
    """Several methods in turn: `stages(fedavg:100, fedmr)` is two-stage FedMR-100.

    A method leads until its last round, which follows its colon; the next one starts from the global model that it leaves.
    Source: FedMR, section 4.3 (two-stage training).

    `stages(fedavg:auto, fedmr)` lets the run choose: a method marked `auto` leads until the held-out loss of the model that it
    sends stops improving, that is until the mean over the last `patience` rounds is not lower, by the share `improvement`, than
    the mean over the `patience` rounds before. The loss never sees the test set: while such a method leads, each client
    keeps back a tenth of its training samples (the same ones in every round), trains on the others, and returns the loss, on
    those kept back, of the model as it came; the server takes the mean weighted as replies are. Afterwards clients train on all
    their samples again.
    Use it to let averaging learn the coarse model fast and recombination finish it, or to hand over between any two
    methods.
    """

    stages: list[tuple[Algorithm, int | str | None]]
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
                    f"stages: a last round is a number or auto, not {last!r}:{suggestion(last, ['auto'])}"
                )
        if lasts[-1] == "auto":
            raise InvalidValue("stages: the last method leads to the end of the run, so it takes no :auto")
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
    def anonymous_replies(self) -> bool:
        return all(method.anonymous_replies for method in self.inner())

    def active(self, number: int) -> Iterator[Algorithm]:
        yield self
        yield from self.leading(number).active(number)

    @property
    def foreseeable(self) -> bool:
        return not self.automatic and super().foreseeable

    def place(self, number: int) -> int:
        """Which method leads round `number`, on the server: of the round in progress or the next one where the run chooses."""
        return int(self.state["leading"]) if self.automatic else self._by_number(number)

    def leading(self, number: int) -> Algorithm:
        """The method that leads round `number`; the last one also after its own last round."""
        return self.stages[self.place(number)][0]

    def _by_number(self, number: int) -> int:
        for place, (_, last) in enumerate(self.stages):
            if last is None or (isinstance(last, int) and number <= last):
                return place
        return len(self.stages) - 1

    def _waiting(self) -> bool:
        """Whether the round in progress is led by a method that ends by itself."""
        return self.automatic and self.stages[int(self.state["leading"])][1] == "auto"

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        self.plan = plan
        self.state = {"finished": torch.zeros(1, dtype=torch.int64)}
        for method in self.inner():
            method.setup(plan)
        if not self.automatic:
            return
        self.state |= {"leading": torch.zeros(1, dtype=torch.int64), "losses": self._no_losses()}
        for method in self.inner():
            if method.expects(plan.opening()).get("model") != (plan.layout.size,):
                raise InvalidValue(
                    "stages: a method that keeps part of the model on its clients cannot be staged by :auto"
                )

    def _no_losses(self) -> Tensor:
        return torch.full((2 * self.patience,), torch.nan, dtype=torch.float64)

    def select(self, round: Round) -> Selection:
        return self.leading(round.number).select(round)

    def send(self, round: Round) -> Message:
        return self._with_stage(self.leading(round.number).send(round))

    def _with_stage(self, message: Message) -> Message:
        return message | {"stage": self.state["leading"].unsqueeze(0)} if self.automatic else message

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        expected = dict(self.leading(round.number).expects(round))
        return expected | {"held_out_loss": ()} if self._waiting() else expected

    def receive(self, round: Round, replies: Replies) -> None:
        if self._waiting():
            loss = weighted_mean(replies["held_out_loss"].double(), replies.weights)
            self.state["losses"] = torch.cat([self.state["losses"][1:], loss.reshape(1).cpu()])
            rest = {name: tensor for name, tensor in replies.tensors.items() if name != "held_out_loss"}
            replies = replace(replies, tensors=rest)
        self.leading(round.number).receive(round, replies)

    def finish(self, round: Round) -> None:
        before = self.place(round.number)
        method = self.stages[before][0]
        method.finish(round)
        after = self._next_place(before, round.number) if self.automatic else self._by_number(round.number + 1)
        if after != before:
            self.stages[after][0].setup(self.plan.starting_from(method.model()))
        self.state["finished"] = torch.tensor([round.number])
        if self.automatic and after != before:
            self.state |= {"leading": torch.tensor([after]), "losses": self._no_losses()}

    def _next_place(self, place: int, number: int) -> int:
        last = self.stages[place][1]
        over = (
            has_stopped_improving(self.state["losses"], self.improvement) if last == "auto" else _is_past(last, number)
        )
        if not over or place + 1 == len(self.stages):
            return place
        place += 1
        while place + 1 < len(self.stages) and _is_past(self.stages[place][1], number):
            place += 1  # its last round went by while the method before waited
        return place

    def model(self) -> Tensor:
        return self._present().model()

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return self._with_stage(self.leading(round.number).deploy(round, clients))

    def diagnose(self) -> dict[str, float]:
        figures = self._present().diagnose()
        if self.automatic:
            figures["stage"] = float(self.state["leading"])
        return figures

    def _present(self) -> Algorithm:
        return self.leading(int(self.state["finished"]) + 1)

    # --- the client half ---

    def _told(self, cohort: Cohort, inbox: Message) -> int:
        """Which method leads, on the client."""
        return int(inbox["stage"].max()) if self.automatic else self._by_number(cohort.round.number)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        method, last = self.stages[self._told(cohort, inbox)]
        rest = {name: rows for name, rows in inbox.items() if name != "stage"}
        if last != "auto":
            return method.train(cohort, rest)
        loss = cohort.subset(held_out, "held_out", lasting=True).loss(server_model(inbox))
        reply = method.train(cohort.subset(not_held_out, "held_out", lasting=True), rest)
        return reply | {"held_out_loss": loss.to(inbox["model"].dtype)}

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        rest = {name: rows for name, rows in inbox.items() if name != "stage"}
        return self.stages[self._told(cohort, inbox)][0].personalise(cohort, rest)

    @property
    def personal(self) -> bool:
        return self._present().personal

    def travels(self, cohort: Cohort) -> Unit:
        if self.automatic:
            return (slice(0, cohort.layout.size),)
        return self.stages[self._by_number(cohort.round.number)][0].travels(cohort)

    def complete(self, cohort: Cohort, model: Tensor) -> Tensor:
        return model if self.automatic else self.stages[self._by_number(cohort.round.number)][0].complete(cohort, model)


def has_stopped_improving(losses: Tensor, improvement: float) -> bool:
    """Whether the mean of the newer half of `losses [2 n]` fails to be lower than that of the older half by the share
    `improvement`; False while some are missing (nan)."""
    older, newer = losses.chunk(2)
    return bool(newer.mean() >= (1 - improvement) * older.mean())


def _is_past(last: int | str | None, number: int) -> bool:
    return isinstance(last, int) and number >= last


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
