"""The schedule of a federation: rounds, participation, evaluation and checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import (
    BelowOne,
    Bytes,
    Count,
    NonNegative,
    NonNegativeInt,
    Share,
    require_fields,
)
from fedloom.rounds.clock import Clock

NEUTRAL = ("checkpoint_every", "pool_budget")
"""Fields of a schedule that change no figure."""


@dataclass(frozen=True)
class Stop:
    """The end of a run before its last round: when a figure no longer improves.

    Args:
        evaluations: Number of consecutive evaluations without improvement that ends the run.
            None never ends it early.
        by: An evaluation is an improvement if it beats the last improvement by more than this.
        metric: A figure of the records, such as `loss` or `personal_accuracy`. "" is the metric of
            the task.
        goal: `rise` or `fall`: the direction of an improvement. Required if the figure is neither
            a loss nor the task's metric.
    """

    evaluations: Count | None = None
    by: NonNegative = 0.0
    metric: str = ""
    goal: Literal["rise", "fall"] | None = None

    def __post_init__(self) -> None:
        require_fields(self)

    def extends(self, other: "Stop") -> bool:
        """Return True if a run can continue with this rule in place of `other`.

        The run may have just ended by `other`, but not in an earlier round by this rule.
        """
        same = (self.by, self.metric, self.goal) == (other.by, other.metric, other.goal)
        return self.evaluations is None or (
            same and self.evaluations >= (other.evaluations or 0) > 0
        )


class Patience:
    """Counts the evaluations of one figure since its last improvement.

    Only evaluations in rounds that are multiples of `every` count. The evaluation after the last
    round does not count, so that an extended run ends in the same round as an uninterrupted one.

    Args:
        stop: The rule that ends the run.
        figure: Name of the figure.
        rises: True if larger values are better.
        every: Rounds between evaluations.
    """

    def __init__(self, stop: Stop, figure: str, rises: bool, every: int) -> None:
        self.stop = stop
        self.figure = figure
        self.rises = rises
        self.every = every
        self.round = 0
        self._best: float | None = None
        self._waited = 0

    def ends(self, number: int, figures: Mapping[str, Any]) -> bool:
        """Return True if the figures of a round end the run.

        Args:
            number: Number of the round.
            figures: Its figures by name.

        Returns:
            False if the run has no early stop.
        """
        return (
            self.stop.evaluations is not None
            and self._since(number, figures)[1] >= self.stop.evaluations
        )

    def update(self, number: int, figures: Mapping[str, Any]) -> None:
        """Count the evaluation of a successful round.

        Args:
            number: Number of the round.
            figures: Its figures by name.
        """
        self.round = self.round or (number if self.ends(number, figures) else 0)
        self._best, self._waited = self._since(number, figures)

    @property
    def notices(self) -> list[str]:
        """The reason for the end of the run, or none while it continues."""
        if not self.round:
            return []
        direction = "risen" if self.rises else "fallen"
        reason = (
            f"{self.figure} has not {direction} by more than {self.stop.by:g} "
            f"in {self.stop.evaluations} evaluations"
        )
        return [f"the run ends after round {self.round}: {reason}"]

    def _since(self, number: int, figures: Mapping[str, Any]) -> tuple[float | None, int]:
        value = figures.get(self.figure)
        if value is None or not math.isfinite(value) or number % max(1, self.every):
            return self._best, self._waited
        gain = 0.0 if self._best is None else (value - self._best) * (1 if self.rises else -1)
        return (
            (value, 0)
            if self._best is None or gain > self.stop.by
            else (self._best, self._waited + 1)
        )


@dataclass(frozen=True)
class Schedule:
    """Rounds, participation, evaluation and checkpoints of a federation.

    Evaluations take place at the intervals `evaluate_every` and `personal_every`, and after the
    last round. None chooses the smallest interval for which all evaluations cost less than a tenth
    of training, counted in samples (see `evaluation.cadence`).

    Args:
        rounds: Number of rounds.
        participation: Share of clients in a round, K = max(1, floor(participation * clients)).
        seed: Seed of all random streams.
        evaluate_every: Rounds between evaluations of the global model. They use the global test
            set and, if the task has `local_test`, the clients' own test data.
        checkpoint_every: Rounds between checkpoints.
        dropout: Probability that a selected client does not answer. It simulates failures and has
            its own random stream.
        personal_every: Rounds between evaluations of the clients' own models on the clients' own
            test data. 0 never evaluates them.
        personal_clients: Largest number of clients that are evaluated on their own data. Each
            evaluation uses the same clients.
        new_clients: Share of clients that never train, floor(new_clients * clients), drawn at
            random. They only use the results of the other clients.
        participation_mode: `fixed` draws K clients without replacement. `poisson` lets each client
            take part independently with probability K / clients, so the number varies. The
            accounting of `private` assumes this.
        pool_budget: Bytes, such as 4000000000 or "4GiB". The models of a pool (FedMR), or all
            replies if a method needs them at once, are in memory-mapped files of the run if they
            need more. None stores them in memory.
        clock: Simulated time of the clients' work, and the time that the server waits. By default
            no time is simulated.
        stop: Rule that ends the run before its last round. By default there is none.
    """

    rounds: Count = 100
    participation: Share = 0.1
    seed: NonNegativeInt = 0
    evaluate_every: Count | None = None
    checkpoint_every: Count = 10
    dropout: BelowOne = 0.0
    personal_every: NonNegativeInt | None = None
    personal_clients: Count = 1000
    new_clients: BelowOne = 0.0
    participation_mode: Literal["fixed", "poisson"] = "fixed"
    pool_budget: Bytes | None = None
    clock: Clock = field(default_factory=Clock)
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        require_fields(self)
        if self.clock.over_selection and self.participation_mode == "poisson":
            raise InvalidValue(
                "clock.over_selection needs participation_mode = 'fixed', got 'poisson': "
                "poisson rounds have no fixed number of replies"
            )

    def newcomers(self, clients: int) -> int:
        """Return the number of clients that never train."""
        # 0.3 * 10 is 2.9999999999999996 in binary, but must give 3.
        return int(self.new_clients * clients + 1e-9)

    def participants(self, trainers: int) -> int:
        """Return the number of clients in one round, of those that train."""
        return max(1, int(self.participation * trainers + 1e-9))
