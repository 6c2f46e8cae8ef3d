"""How long a federation runs, with whom, and how often it looks at itself."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedloom.config.fields import (
    BelowOne,
    Bytes,
    Count,
    NonNegative,
    NonNegativeInt,
    Share,
    require_fields,
)
from fedloom.errors import InvalidValue
from fedloom.rounds.clock import Clock

NEUTRAL = ("checkpoint_every", "pool_budget")
"""Fields of a schedule on which no figure depends."""


@dataclass(frozen=True)
class Stop:
    """The end of a run before its last round: when a figure no longer improves.

    Args:
        evaluations: The run ends when so many evaluations in a row bring no improvement; None:
            never.
        by: An evaluation is an improvement if it beats the last improvement by more than this.
        metric: A figure of the records, such as `loss` or `personal_accuracy`; "": the metric of
            the task.
        goal: `rise` or `fall` says what an improvement is, for a figure that is neither a loss nor
            the task's metric.
    """

    evaluations: Count | None = None
    by: NonNegative = 0.0
    metric: str = ""
    goal: Literal["rise", "fall"] | None = None

    def __post_init__(self) -> None:
        require_fields(self)

    def waits_longer(self, other: "Stop") -> bool:
        """Return True if a run that `other` has not ended, or has just ended, can go on with this
        one.
        """
        same = (self.by, self.metric, self.goal) == (other.by, other.metric, other.goal)
        return self.evaluations is None or (
            same and self.evaluations >= (other.evaluations or 0) > 0
        )


class Patience:
    """The evaluations of a run since the last improvement of one figure, in rounds that are
    multiples of `every`.

    Others do not count, such as that after the last round: a run that is lengthened ends where it
    would have ended at once.
    """

    def __init__(self, stop: Stop, figure: str, rises: bool, every: int) -> None:
        self.stop, self.figure, self.rises, self.every = stop, figure, rises, every
        self.round = 0
        self._best: float | None = None
        self._waited = 0

    def ends(self, number: int, figures: Mapping[str, Any]) -> bool:
        """Return True if the figures of round `number` end the run."""
        return (
            self.stop.evaluations is not None
            and self._since(number, figures)[1] >= self.stop.evaluations
        )

    def see(self, number: int, figures: Mapping[str, Any]) -> None:
        """Take in the figures of a round that has succeeded."""
        self.round = self.round or (number if self.ends(number, figures) else 0)
        self._best, self._waited = self._since(number, figures)

    @property
    def notices(self) -> list[str]:
        """The reason for the end; none while the run goes on."""
        text = f"{self.figure} has not {'risen' if self.rises else 'fallen'} by more than {self.stop.by:g}"
        end = (
            f"the run ends after round {self.round}: {text} in {self.stop.evaluations} evaluations"
        )
        return [end] if self.round else []

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
    """The course of a federation: how long it runs, who takes part, and how often it is evaluated
    and saved.

    `participation` is the share of clients in a round, K = max(1, floor(participation * clients)).
    With the `participation_mode` `fixed` K are drawn without replacement; with `poisson` each takes
    part by itself with probability K / clients, so that the number varies, as the accounting of
    `private` assumes. `dropout` is the chance that a selected client does not answer (for studying
    it; drawn from its own stream). `new_clients` is the share of clients, floor(new_clients *
    clients) of them drawn at random, that never train and only use what the others made.

    Evaluations take place every so many rounds and after the last one. `evaluate_every`: the global
    model, on the global test set and on the clients' own test data where the task has such
    (`local_test`). `personal_every`: the models that the clients would use, on their own test data;
    0 leaves that data alone. None chooses the smallest numbers that keep all evaluation below a
    tenth of the work of training, by counting samples (see `evaluation.cadence`).
    `personal_clients`: at most so many clients, the same ones each time, are evaluated on their own
    data.

    `pool_budget`: bytes, such as 4000000000 or "4GiB", beyond which the models of a pool (FedMR),
    or all replies where a method needs them together, lie in files of the run, of which the system
    keeps in memory what it has room for. None: in memory.

    `clock`: how long clients take, and how long the server waits for them. By default no time is
    simulated.

    `stop`: when the run ends before its last round. By default it does not.
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
                "clock.over_selection: a poisson round has no number of replies to wait for"
            )

    def newcomers(self, clients: int) -> int:
        """Return how many of the clients never train."""
        # 0.3 * 10 gives 3, which is 2.9999999999999996 in binary
        return int(self.new_clients * clients + 1e-9)

    def participants(self, trainers: int) -> int:
        """Return how many of the clients that train do so in one round."""
        return max(1, int(self.participation * trainers + 1e-9))
