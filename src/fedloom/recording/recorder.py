"""Recorders write down chosen values of chosen rounds, without any influence on the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from fedloom.config.expression import show
from fedloom.config.fields import require_fields
from fedloom.config.registry import Registry
from fedloom.errors import InvalidValue
from fedloom.method import Method
from fedloom.parts.course import pipelines
from fedloom.rounds.federation import Federation
from fedloom.rounds.scoring import Evaluator
from fedloom.task import Task

Series = Sequence[tuple[int, Any]]
"""(round, value measured in it), in the order of the rounds."""

Tensors = Mapping[int, Mapping[str, Tensor]]
"""Tensors of measurements, by round and name."""


@dataclass(frozen=True)
class RunContext:
    """The run as recorders see it. Clients are numbered as in `task`; `numbers` are the numbers
    that the user knows them by.
    """

    task: Task
    rounds: int
    trainers: int
    numbers: Sequence[int]
    evaluator: Evaluator

    def training_loss(self, row: Tensor, client: int, integers: Tensor | None) -> tuple[float, int]:
        """Return the loss of the model `row [P]` in evaluation mode, summed over a client's
        training samples, and their count.
        """
        tally = self.evaluator.tally(row, self.task.train, self.task.partition, [client], integers)
        samples = int(tally.samples[0])
        return tally.overall(self.task.objective)["loss"] * samples, samples

    def require_test_samples(self) -> None:
        """Raise `InvalidValue` where the test set is empty."""
        if not len(self.task.test):
            raise InvalidValue(f"the test set of {self.task.dataset.name!r} is empty")

    def test_score(self, row: Tensor, integers: Tensor | None) -> dict[str, float]:
        """Return the figures of the model `row [P]` on the global test set, in evaluation mode."""
        return self.evaluator.score(row, self.task.test, integers)

    def client(self, number: int) -> int:
        """Return the client that the user calls by this number. Raises `InvalidValue` where none
        does or it never trains.
        """
        numbers = list(self.numbers)
        if number not in numbers:
            raise InvalidValue(f"client must be between 0 and {len(numbers) - 1}, not {number}")
        if numbers.index(number) >= self.trainers:
            raise InvalidValue(f"client {number} never trains (new_clients)")
        return numbers.index(number)


@dataclass(frozen=True)
class ClientExchange:
    """The models `[P]` and integer buffers (if any) that a client, the round's `slot`-th, received
    and uploaded.
    """

    slot: int
    client: int
    received: Tensor
    uploaded: Tensor
    received_integers: Tensor | None
    uploaded_integers: Tensor | None


@dataclass(frozen=True)
class Measurement:
    """A recorder's value of one round, ready for JSON, and named tensors, such as models."""

    value: Any
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorder:
    """Writes down one thing, round by round."""

    def __post_init__(self) -> None:
        """Check the options against the types of their fields, ranges included
        (`fedloom.config.fields`).
        """
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
        """True if it hooks into the clients' training, which then must take place in this process."""
        return type(self).hook is not Recorder.hook

    @property
    def needs_models(self) -> bool:
        """True if it needs the models that clients receive and upload."""
        return type(self).measure is not Recorder.measure

    def inapplicable(self, method: Method) -> str:
        """Return the reason why this method, not yet set up, has nothing to record; empty where it
        has.
        """
        return ""

    def require(self, context: RunContext) -> None:
        """Raise `InvalidValue` when this run has no such client or round."""

    def hook(self, federation: Federation, context: RunContext) -> Callable[[int], Any] | None:
        """Hook into the method's code or the clients' work, if needed; the function returned gives
        a round's value, or its `Measurement`.
        """
        return None

    def measure(
        self, number: int, exchanges: Sequence[ClientExchange], context: RunContext
    ) -> Measurement | None:
        """Return the measurement of round `number`, in which clients exchanged these models, in the
        order of the slots.
        """
        return None

    def complete(self, value: Any, federation: Federation, context: RunContext) -> Any:
        """Return a measurement's value once the method has received the replies: figures of the
        aggregate may be added.
        """
        return value

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        """Return all measurements as reports draw them: by default the rounds and, by name, the
        values, where there are any.
        """
        curves = {name: [value[name] for _, value in series] for name in series[0][1]}
        measured = {
            name: values
            for name, values in curves.items()
            if any(value is not None for value in values)
        }
        return {"rounds": [number for number, _ in series], **measured}


recorders: Registry[type[Recorder]] = Registry("recorder", "fedloom.recording")


def build_recorders(expressions: Sequence[str]) -> list[Recorder]:
    """Return the recorders of expressions such as `ala(client=8)`. Raises `InvalidValue` for two
    that would record the same.
    """
    built: list[Recorder] = []
    for text in expressions:
        recorder: Recorder = recorders.build(text)
        if recorder.name in [previous.name for previous in built]:
            raise InvalidValue(f"{recorder.name} is recorded once, not twice")
        built.append(recorder)
    return built


def expression(recorder: Recorder) -> str:
    """Return the expression that builds this recorder again, with every parameter."""
    parameters = ", ".join(
        f"{field.name}={show(getattr(recorder, field.name))}" for field in fields(recorder)
    )
    return f"{recorder.kind}({parameters})"


def partial_models(method: Method) -> str:
    """Return the reason why clients of the method, which is set up, do not exchange whole models;
    else "".
    """
    for pipeline in pipelines(method):
        if not pipeline.algorithm.facts.one_download:
            return "its clients are not sent one model"
        opening = pipeline.plan.opening()
        if "model" not in pipeline.expected(opening) or not pipeline.returns_whole(opening):
            return "its clients keep part of the model to themselves"
    return ""
