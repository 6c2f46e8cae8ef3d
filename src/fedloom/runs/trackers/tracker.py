"""The interface of trackers, how they are made, and the trackers of one run."""

import importlib.util
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from fedloom.common.errors import CheckpointError, FedloomError, InvalidValue, error_text, quoted
from fedloom.common.expression import parse, plain
from fedloom.common.plugins import found_at
from fedloom.common.registry import Registry
from fedloom.rounds.evaluation import Record
from fedloom.runs.directory import read_json
from fedloom.state.files import write_bytes


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it at its start.

    Attributes:
        experiment: The experiment's name.
        label: The run's name in the experiment, such as `fedmr/seed-0`.
        algorithm: The method's expression.
        seed: The run's seed.
        configuration: Everything that the figures depend on, as plain values.
        token: Stays the same when the run is resumed, and changes when it starts again.
        directory: The folder of the run's files; None for a run without.
    """

    experiment: str
    label: str
    algorithm: str
    seed: int
    configuration: Mapping[str, Any]
    token: str
    directory: Path | None = None


@runtime_checkable
class Tracker(Protocol):
    """Interface of a tracker: any class with these three methods, named as `"module:Class"`.

    A tracker that raises is disabled with a notice; the run continues.
    """

    def begin(self, run: TrackedRun) -> int | None:
        """Begin or resume a run.

        Returns:
            The last round that the tracker has already, so that no round is recorded twice. With
            None, the run remembers it, up to the round in progress when it was killed.
        """

    def record(self, round: int, figures: Mapping[str, float]) -> None:
        """Record a round.

        Args:
            round: The round's number, from 1.
            figures: All that was measured, by name; accuracies are shares in [0, 1], times are
                seconds.
        """

    def end(self, result: Mapping[str, float] | None) -> None:
        """End the run.

        Args:
            result: The figures at the end, or None when the run stopped earlier.
        """


trackers: Registry[type[Tracker]] = Registry("tracker", "fedloom.runs.trackers")


def build_tracker(expression: str | Tracker) -> Tracker:
    """Make a tracker, such as `tensorboard` or `module:Class(option=1)`, unless it is one already.

    Raises `UnknownName` or `InvalidValue`, and `FedloomError` if its package is not installed.
    """
    if not isinstance(expression, str):
        return expression
    head, bracket, arguments = expression.partition("(")
    if ":" not in head:
        return cast(Tracker, trackers.build(expression))
    make = found_at(head.strip(), "tracker")
    call = parse(f"own{bracket}{arguments}")
    named = {name: plain(value) for name, value in call.named.items()}
    try:
        tracker = make(*map(plain, call.positional), **named)
    except FedloomError:
        raise
    except Exception as error:
        raise InvalidValue(
            f"tracker {quoted(expression)} cannot be made: {error_text(error)}"
        ) from error
    if not isinstance(tracker, Tracker):
        raise InvalidValue(
            f"tracker {quoted(expression)} is none: a tracker has begin, record and end"
        )
    return tracker


def require_installed(package: str, install: str) -> None:
    """Raise `FedloomError` with the way to `install` the package unless it is installed.

    Args:
        package: Name of the package in an import.
        install: Command or sentence for the error.
    """
    if importlib.util.find_spec(package) is None:
        raise FedloomError(f"tracker {package} needs {package!r}: {install}")


FILE = "trackers.json"
"""In the run's directory: the run's token, and the last round that each tracker recorded."""


class Tracking:
    """Passes a run on to its trackers. A tracker that fails is disabled with a notice."""

    def __init__(
        self,
        expressions: Sequence[str | Tracker],
        directory: Path | None,
        notify: Callable[[str], None],
    ) -> None:
        self._trackers = {
            _name(tracker, k): build_tracker(tracker) for k, tracker in enumerate(expressions)
        }
        self._directory = directory
        self._notify = notify
        self._state: dict[str, Any] = {"token": uuid.uuid4().hex, "latest": {}}
        self._result: Mapping[str, float] | None = None

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._trackers):
            self._attempt(name, "end", self._result)

    def begin(
        self,
        experiment: str,
        label: str,
        configuration: Mapping[str, Any],
        records: Sequence[Record],
        timings: Sequence[Record],
    ) -> None:
        """Begin or resume a run, and record the rounds that trackers missed.

        Args:
            experiment: The experiment's name.
            label: The run's name in the experiment.
            configuration: The resolved configuration.
            records: Figures of the rounds so far.
            timings: Times of the rounds so far.
        """
        if not self._trackers:
            return
        if self._directory is not None:
            with suppress(CheckpointError):
                self._state = read_json(self._directory / FILE, dict)
        self._write()
        run = TrackedRun(
            experiment,
            label,
            str(configuration["algorithm"]),
            int(configuration["seed"]),
            configuration,
            self._state["token"],
            self._directory,
        )
        for name in list(self._trackers):
            recorded = self._attempt(name, "begin", run)
            if recorded is not None:
                self._state["latest"][name] = recorded
        seconds = {timing["round"]: timing for timing in timings}
        for record in records:
            self.record(record, seconds.get(record["round"], {}))

    def record(self, record: Record, timing: Record) -> None:
        """Pass a round on to the trackers that have not recorded it.

        Args:
            record: Line of `metrics.jsonl`.
            timing: Line of `timings.jsonl`.
        """
        number = int(record["round"])
        latest = self._state["latest"]
        faults = len(record.get("faults", ()))
        figures = _numbers({**record, "faults": faults, **timing, "round": None})
        for name in [name for name in self._trackers if latest.get(name, 0) < number]:
            self._attempt(name, "record", number, figures)
            latest[name] = number
            self._write()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Note the figures at the end of a finished run."""
        self._result = _numbers(result)

    def _write(self) -> None:
        if self._directory is not None:
            write_bytes(self._directory / FILE, json.dumps(self._state).encode(), durable=False)

    def _attempt(self, name: str, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._trackers[name], method)(*arguments)
        except Exception as error:  # the run is worth more than any tracker
            self._trackers.pop(name, None)
            self._notify(f"tracker {name} failed and is disabled for this run: {error_text(error)}")
            return None


def _name(expression: str | Tracker, index: int) -> str:
    """Return a tracker's name in notices and in the file, the same at every start of the run."""
    return expression if isinstance(expression, str) else f"{type(expression).__name__} {index + 1}"


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {
        k: float(v)
        for k, v in figures.items()
        if isinstance(v, int | float) and not isinstance(v, bool)
    }
