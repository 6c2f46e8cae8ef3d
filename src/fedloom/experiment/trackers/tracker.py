"""The interface of a tracker, and how one is made from an expression."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from fedloom.config.expression import Call, parse, plain
from fedloom.config.plugins import found_at
from fedloom.config.registry import Registry
from fedloom.errors import FedloomError, InvalidValue, error_text, quoted


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run at its start.

    `configuration` holds everything the figures depend on, as plain values. `token` is the same whenever the run goes on, and
    another when it starts afresh. `directory` is where the run's files lie (None for a run without); `label` is how it is
    called among the runs of `experiment`, such as `fedmr/seed-0`.
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
    """What hears of a run: implement these three, in any class, and name it as `"module:Class"`.

    Whatever a tracker raises takes it out of the run, with one line that says so; the run goes on.
    """

    def begin(self, run: TrackedRun) -> int | None:
        """The run begins or goes on. The answer is the last round whose figures are there already, so that none is told of
        twice; with None, the run remembers that by itself, up to the round under way when it was killed."""

    def record(self, round: int, figures: Mapping[str, float]) -> None:
        """A round is over. `figures`: all that was measured, by name; accuracies are shares in [0, 1], times are seconds."""

    def end(self, result: Mapping[str, float] | None) -> None:
        """The run is over: its figures at the end, or None when it stopped before its last round."""


trackers: Registry[type[Tracker]] = Registry("tracker", "fedloom.experiment.trackers")


def build_tracker(expression: str | Tracker) -> Tracker:
    """The tracker of an expression such as `tensorboard`, `mlflow(uri='sqlite:///mlflow.db')` or `module:Class`.

    Raises `UnknownName` or `InvalidValue`, in one line, for whatever does not fit, and `FedloomError` for a package that is
    not installed.
    """
    if not isinstance(expression, str):
        return expression
    head, bracket, arguments = expression.partition("(")
    if ":" in head:
        return _own(head.strip(), parse(f"own{bracket}{arguments}"), expression)
    return cast(Tracker, trackers.build(expression))


def require_installed(package: str, install: str) -> None:
    """Raise `FedloomError`, saying how to `install` it, unless the package is there."""
    if importlib.util.find_spec(package) is None:
        raise FedloomError(f"tracker {package} needs {package!r}: {install}")


def _own(path: str, call: Call, expression: str) -> Tracker:
    """A tracker of the user's own."""
    make = found_at(path, "tracker")
    try:
        made = make(*map(plain, call.positional), **{name: plain(value) for name, value in call.named.items()})
    except FedloomError:
        raise
    except Exception as error:
        raise InvalidValue(f"tracker {quoted(expression)} cannot be made: {error_text(error)}") from error
    missing = [name for name in ("begin", "record", "end") if not callable(getattr(made, name, None))]
    if missing:
        raise InvalidValue(
            f"tracker {quoted(expression)} lacks {', '.join(missing)}: a tracker has begin, record and end"
        )
    return made  # type: ignore[no-any-return]
