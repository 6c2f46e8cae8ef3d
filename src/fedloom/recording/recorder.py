"""What a recorder is: something to be written down of chosen rounds, without any influence on the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.expression import show
from fedloom.config.fields import require_fields
from fedloom.config.registry import Registry
from fedloom.errors import InvalidValue
from fedloom.rounds.scoring import Evaluator, Score
from fedloom.task import Task

Series = Sequence[tuple[int, Any]]
"""(round, what was noted in it), in the order of the rounds."""


@dataclass(frozen=True)
class RunContext:
    """The run as recorders see it. Clients count as in `task`; `numbers` are those that the user knows."""

    task: Task
    rounds: int
    trainers: int
    numbers: Sequence[int]
    evaluator: Evaluator

    def training_loss(self, row: Tensor, client: int, integers: Tensor | None) -> tuple[float, int]:
        """Cross entropy of the model `row [P]` in evaluation mode, summed over a client's training samples; their number."""
        tally = self.evaluator.tally(row, self.task.train, self.task.partition, [client], integers)
        return float(tally.loss[0]), int(tally.samples[0])

    def require_test_samples(self) -> None:
        """Raise `InvalidValue` where the test set is empty."""
        if not len(self.task.test):
            raise InvalidValue(f"the test set of {self.task.dataset.name!r} is empty")

    def test_score(self, row: Tensor, integers: Tensor | None) -> Score:
        """The model `row [P]` on the global test set, in evaluation mode."""
        return self.evaluator.score(row, self.task.test, integers)

    def place(self, number: int) -> int:
        """The client that the user knows by this number. Raises `InvalidValue` when there is none, or it never trains."""
        known = list(self.numbers)
        if number not in known:
            raise InvalidValue(f"client must be between 0 and {len(known) - 1}, not {number}")
        if known.index(number) >= self.trainers:
            raise InvalidValue(f"client {number} never trains (new_clients)")
        return known.index(number)


@dataclass(frozen=True)
class Exchange:
    """What one client received in a round and what it uploaded: models `[P]` and, where there are any, integer buffers.

    `slot` is its place among the round's selected clients.
    """

    slot: int
    client: int
    received: Tensor
    uploaded: Tensor
    received_integers: Tensor | None
    uploaded_integers: Tensor | None


@dataclass(frozen=True)
class Note:
    """What is written down of one round: a value ready for JSON and, where models are kept, named tensors."""

    value: Any
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorder:
    """Notes one thing, round by round."""

    def __post_init__(self) -> None:
        """Check the options against the types of their fields, ranges included (`fedloom.config.fields`)."""
        require_fields(self)

    @property
    def name(self) -> str:
        """Under which name its notes are kept; two recorders of one run have different ones."""
        raise NotImplementedError

    def unfit(self, method: Algorithm) -> str:
        """Why this method, not yet set up, has nothing to be recorded; empty where it has."""
        return ""

    def require(self, scene: RunContext) -> None:
        """Raise `InvalidValue` when this run has no such client or round."""

    def attach(self, method: Algorithm, scene: RunContext) -> Callable[[int], Any] | None:
        """Listen to the method itself, where what it reports is recorded; the answer hands out what a round reported."""
        return None

    def note(self, number: int, exchanges: Sequence[Exchange], scene: RunContext) -> Note | None:
        """What there is to note of round `number`, in which the clients exchanged these models, in the order of the slots."""
        return None

    def settle(self, value: Any, method: Algorithm, integers: Tensor, scene: RunContext) -> Any:
        """A round's noted value once the method has received the replies: what it makes of them may be added here."""
        return value

    def result(self, series: Series, tensors: Mapping[int, Mapping[str, Tensor]], scene: RunContext) -> dict[str, Any]:
        """All notes as what reports draw; `tensors` are those noted, by round."""
        raise NotImplementedError


recorders: Registry[type[Recorder]] = Registry("recorder", "fedloom.recording")


def build_recorders(expressions: Sequence[str]) -> list[Recorder]:
    """The recorders of expressions such as `objective(every=10)` or `ala(client=8)`.

    Raises `UnknownName` or `InvalidValue`, in one line, for whatever does not fit, and for two that would note the same thing.
    """
    found: list[Recorder] = []
    for text in expressions:
        recorder: Recorder = recorders.build(text)
        if any(recorder.name == other.name for other in found):
            raise InvalidValue(f"{recorder.name} is recorded once, not twice")
        found.append(recorder)
    return found


def expression(recorder: Recorder) -> str:
    """The expression that builds this recorder again, every parameter given."""
    entry = next(entry for entry in recorders if entry.make is type(recorder))
    given = ", ".join(f"{f.name}={show(getattr(recorder, f.name))}" for f in fields(recorder))
    return f"{entry.name}({given})"


def whole_models(method: Algorithm) -> str:
    """Why the method's clients do not receive one model and upload one, both whole; empty where they do. The method is set up."""
    for part in method.nested():
        if not part.single_download:
            return "its clients download several models"
        if part.expects(part.plan.opening()).get("model") != (part.layout.size,):
            return "its clients keep part of the model to themselves"
    return ""
