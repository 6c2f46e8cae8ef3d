"""What a recorder is: it writes down chosen values of chosen rounds, without any influence on the run."""

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
from fedloom.rounds.scoring import Evaluator
from fedloom.task import Task

Series = Sequence[tuple[int, Any]]
"""(round, value measured in it), in the order of the rounds."""

Kept = Mapping[int, Mapping[str, Tensor]]
"""The tensors kept with measurements, by round and name."""


@dataclass(frozen=True)
class RunContext:
    """The run as recorders see it. Clients are numbered as in `task`; `numbers` are the numbers that the user knows them by."""

    task: Task
    rounds: int
    trainers: int
    numbers: Sequence[int]
    evaluator: Evaluator

    def training_loss(self, row: Tensor, client: int, integers: Tensor | None) -> tuple[float, int]:
        """Loss of the model `row [P]` in evaluation mode, summed over a client's training samples, and their number."""
        tally = self.evaluator.tally(row, self.task.train, self.task.partition, [client], integers)
        samples = int(tally.samples[0])
        return tally.overall(self.task.objective)["loss"] * samples, samples

    def require_test_samples(self) -> None:
        """Raise `InvalidValue` where the test set is empty."""
        if not len(self.task.test):
            raise InvalidValue(f"the test set of {self.task.dataset.name!r} is empty")

    def test_score(self, row: Tensor, integers: Tensor | None) -> dict[str, float]:
        """The model `row [P]` on the global test set, in evaluation mode."""
        return self.evaluator.score(row, self.task.test, integers)

    def client(self, number: int) -> int:
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
class Measurement:
    """What is written down of one round: a value ready for JSON and, where models are kept, named tensors."""

    value: Any
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorder:
    """Writes down one thing, round by round."""

    def __post_init__(self) -> None:
        """Check the options against the types of their fields, ranges included (`fedloom.config.fields`)."""
        require_fields(self)

    @property
    def kind(self) -> str:
        """The name under which it is registered."""
        return next(entry.name for entry in recorders if entry.make is type(self))

    @property
    def name(self) -> str:
        """The name of its measurements; two recorders of one run have different ones."""
        return self.kind

    @property
    def hooks_training(self) -> bool:
        """Whether it hooks into the clients' training, which then must take place in this process."""
        return type(self).hook is not Recorder.hook

    @property
    def needs_models(self) -> bool:
        """Whether it needs the models that clients receive and upload."""
        return type(self).measure is not Recorder.measure

    def inapplicable(self, method: Algorithm) -> str:
        """Why this method, not yet set up, has nothing to be recorded; empty where it has."""
        return ""

    def require(self, context: RunContext) -> None:
        """Raise `InvalidValue` when this run has no such client or round."""

    def hook(self, method: Algorithm, context: RunContext) -> Callable[[int], Any] | None:
        """Hook into the method itself, where it reports what is recorded; the function returned gives what a round reported."""
        return None

    def measure(self, number: int, exchanges: Sequence[Exchange], context: RunContext) -> Measurement | None:
        """The measurement of round `number`, in which the clients exchanged these models, in the order of the slots."""
        return None

    def complete(self, value: Any, method: Algorithm, integers: Tensor, context: RunContext) -> Any:
        """The value of a round's measurement once the method has received the replies: what it makes of them may be added."""
        return value

    def result(self, series: Series, kept: Kept, context: RunContext) -> dict[str, Any]:
        """All measurements as reports draw them: here the rounds and, by name, the values of each."""
        names = series[0][1]
        return {"rounds": rounds_of(series), **{name: [value[name] for _, value in series] for name in names}}


recorders: Registry[type[Recorder]] = Registry("recorder", "fedloom.recording")


def rounds_of(series: Series) -> list[int]:
    """The rounds that were measured."""
    return [number for number, _ in series]


def build_recorders(expressions: Sequence[str]) -> list[Recorder]:
    """The recorders of expressions such as `objective(every=10)` or `ala(client=8)`.

    Raises `UnknownName` or `InvalidValue`, in one line, for whatever does not fit, and for two that would record the same thing.
    """
    found: list[Recorder] = []
    for text in expressions:
        recorder: Recorder = recorders.build(text)
        if any(recorder.name == other.name for other in found):
            raise InvalidValue(f"{recorder.name} is recorded once, not twice")
        found.append(recorder)
    return found


def expression(recorder: Recorder) -> str:
    """The expression that builds this recorder again, with every parameter."""
    given = ", ".join(f"{f.name}={show(getattr(recorder, f.name))}" for f in fields(recorder))
    return f"{recorder.kind}({given})"


def partial_models(method: Algorithm) -> str:
    """Why the method's clients do not receive one model and upload one, both whole; empty where they do. The method is set up."""
    for part in method.nested():
        if not part.single_download:
            return "its clients download several models"
        if part.expects(part.plan.opening()).get("model") != (part.layout.size,):
            return "its clients keep part of the model to themselves"
    return ""
