"""Recorders store chosen values of chosen rounds, without any influence on the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from fedloom.algorithm.method import Method
from fedloom.common.errors import InvalidValue
from fedloom.common.expression import show
from fedloom.common.fields import require_fields
from fedloom.common.registry import Registry
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
    """The run as seen by recorders.

    Attributes:
        task: The task; clients are numbered as in it.
        rounds: Number of rounds.
        trainers: Number of clients that train.
        numbers: The user's number of each client.
        evaluator: Computes losses and figures.
    """

    task: Task
    rounds: int
    trainers: int
    numbers: Sequence[int]
    evaluator: Evaluator

    def training_loss(self, row: Tensor, client: int, integers: Tensor | None) -> tuple[float, int]:
        """Return a model's loss on a client's training samples, in evaluation mode.

        Args:
            row: The model, `[P]`.
            client: Number of the client.
            integers: Integer buffers of the model.

        Returns:
            The sum of the losses, and the number of samples.
        """
        tally = self.evaluator.tally(row, self.task.train, self.task.partition, [client], integers)
        samples = int(tally.samples[0])
        return tally.overall(self.task.objective)["loss"] * samples, samples

    def require_test_samples(self) -> None:
        """Raise `InvalidValue` if the test set is empty."""
        if not len(self.task.test):
            raise InvalidValue(f"the test set of {self.task.dataset.name!r} is empty")

    def test_score(self, row: Tensor, integers: Tensor | None) -> dict[str, float]:
        """Return the figures of a model on the global test set, in evaluation mode.

        Args:
            row: The model, `[P]`.
            integers: Integer buffers of the model.

        Returns:
            Values by name, such as `accuracy` in [0, 1] and `loss`.
        """
        return self.evaluator.score(row, self.task.test, integers)

    def client(self, number: int) -> int:
        """Return the client with this number of the user.

        Raises:
            InvalidValue: No client has this number, or the client never trains.
        """
        numbers = list(self.numbers)
        if number not in numbers:
            raise InvalidValue(f"client must be between 0 and {len(numbers) - 1}, not {number}")
        if numbers.index(number) >= self.trainers:
            raise InvalidValue(f"client {number} never trains (new_clients)")
        return numbers.index(number)


@dataclass(frozen=True)
class ClientExchange:
    """The models that a client received and uploaded in a round.

    Attributes:
        slot: Slot of the client.
        client: Number of the client.
        received: The received model, `[P]`.
        uploaded: The uploaded model, `[P]`.
        received_integers: Integer buffers, if any.
        uploaded_integers: Integer buffers, if any.
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
    """Records one kind of value, round by round."""

    def __post_init__(self) -> None:
        """Check the options against the types and ranges of their fields."""
        require_fields(self)

    @property
    def kind(self) -> str:
        """Name under which the recorder is registered."""
        return next(entry.name for entry in recorders if entry.make is type(self))

    @property
    def name(self) -> str:
        """Name of its measurements; two recorders of one run have different names."""
        return self.kind

    @property
    def hooks_training(self) -> bool:
        """True if it hooks into the clients' training, which must then run in this process."""
        return type(self).hook is not Recorder.hook

    @property
    def needs_models(self) -> bool:
        """True if it needs the models that clients receive and upload."""
        return type(self).measure is not Recorder.measure

    def inapplicable(self, method: Method) -> str:
        """Return the reason why the method has no values to record; empty if it has.

        The method is not set up yet.
        """
        return ""

    def require(self, context: RunContext) -> None:
        """Raise `InvalidValue` if this run has no such client or round."""

    def hook(self, federation: Federation, context: RunContext) -> Callable[[int], Any] | None:
        """Hook into the method's code or the clients' work, if needed.

        Args:
            federation: The federation before its first round.
            context: The run.

        Returns:
            A function from the number of a round to its value or `Measurement`, or None.
        """
        return None

    def measure(
        self, number: int, exchanges: Sequence[ClientExchange], context: RunContext
    ) -> Measurement | None:
        """Return the measurement of round `number`.

        Args:
            number: Number of the round.
            exchanges: The clients' models, in the order of the slots.
            context: The run.

        Returns:
            The measurement; None if the round is not recorded.
        """
        return None

    def complete(self, value: Any, federation: Federation, context: RunContext) -> Any:
        """Return a measurement's value after the method has received the replies.

        Figures of the aggregate may be added.

        Args:
            value: The value of `measure` or of the hook.
            federation: The federation after the round.
            context: The run.

        Returns:
            The value to store; by default unchanged.
        """
        return value

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        """Return all measurements in the form for reports.

        Args:
            series: (round, value) in the order of the rounds.
            tensors: Tensors by round and name.
            context: The run.

        Returns:
            By default the rounds and, by name, the values that any round has.
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
    """Return the recorders of expressions such as `ala(client=8)`.

    Raises:
        InvalidValue: Two expressions would record the same values.
    """
    built: list[Recorder] = []
    for text in expressions:
        recorder: Recorder = recorders.build(text)
        if recorder.name in [previous.name for previous in built]:
            raise InvalidValue(f"{recorder.name} is recorded once, not twice")
        built.append(recorder)
    return built


def expression(recorder: Recorder) -> str:
    """Return the expression that builds this recorder, with every parameter."""
    parameters = ", ".join(
        f"{field.name}={show(getattr(recorder, field.name))}" for field in fields(recorder)
    )
    return f"{recorder.kind}({parameters})"


def partial_models(method: Method) -> str:
    """Return the reason why clients of the method do not exchange whole models, or "".

    The method is set up.
    """
    for pipeline in pipelines(method):
        if not pipeline.algorithm.facts.one_download:
            return "its clients do not receive one model"
        opening = pipeline.plan.opening()
        if "model" not in pipeline.expected(opening) or not pipeline.returns_whole(opening):
            return "part of the model stays at its clients"
    return ""
