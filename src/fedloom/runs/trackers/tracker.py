"""The interface of a tracker, and how one is made from an expression."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from fedloom.config.expression import parse, plain
from fedloom.config.plugins import found_at
from fedloom.config.registry import Registry
from fedloom.errors import FedloomError, InvalidValue, error_text, quoted


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it at its start.

    Attributes:
        experiment: The experiment's name.
        label: The run's name in the experiment, such as `fedmr/seed-0`.
        algorithm: The method's expression.
        seed: The run's seed.
        configuration: Everything that the figures depend on, as plain values.
        token: The same whenever the run goes on, and another when it starts afresh.
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

    A tracker that raises is left out from then on, with a notice; the run goes on.
    """

    def begin(self, run: TrackedRun) -> int | None:
        """Begin or resume a run.

        Returns:
            The last round whose figures the tracker has already, so that none is recorded twice.
            With None, the run remembers it, up to the round under way when it was killed.
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
    """Make a tracker, such as `tensorboard` or `module:Class(option=1)`; one that is made already
    is returned as it is.

    Raises `UnknownName` or `InvalidValue`, and `FedloomError` where its package is not installed.
    """
    if not isinstance(expression, str):
        return expression
    head, bracket, arguments = expression.partition("(")
    if ":" not in head:
        return cast(Tracker, trackers.build(expression))
    make, call = found_at(head.strip(), "tracker"), parse(f"own{bracket}{arguments}")
    try:
        tracker = make(
            *map(plain, call.positional),
            **{name: plain(value) for name, value in call.named.items()},
        )
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
    """Raise `FedloomError`, saying how to `install` it, unless the package is there."""
    if importlib.util.find_spec(package) is None:
        raise FedloomError(f"tracker {package} needs {package!r}: {install}")
