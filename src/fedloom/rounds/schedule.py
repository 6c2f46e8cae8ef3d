"""How long a federation runs, with whom, and how often it looks at itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedloom.config.fields import BelowOne, Bytes, Count, NonNegativeInt, Share, require_fields
from fedloom.errors import InvalidValue
from fedloom.rounds.clock import Clock

NEUTRAL = ("checkpoint_every", "pool_budget")
"""Fields of a schedule on which no figure depends."""


@dataclass(frozen=True)
class Schedule:
    """The course of a federation: how long it runs, who takes part, and how often it is evaluated and saved.

    `participation` is the share of clients in a round, K = max(1, floor(participation * clients)). With the `participation_mode`
    `fixed` K are drawn without replacement; with `poisson` each takes part by itself with probability K / clients, so that the
    number varies, as the accounting of `private` assumes. `dropout` is the chance that
    a selected client does not answer (for studying it; drawn from its own stream). `new_clients` is the share of clients,
    floor(new_clients * clients) of them drawn at random, that never train and only use what the others made.

    Evaluations take place every so many rounds and after the last one. `evaluate_every`: the global model, on the global test
    set and on the clients' own test data where the task has such (`local_test`). `personal_every`: the models that the clients
    would use, on their own test data; 0 leaves that data alone. None chooses the smallest numbers that keep all evaluation
    below a tenth of the work of training, by counting samples (see `evaluation.cadence`). `personal_clients`: at most so many
    clients, the same ones each time, are evaluated on their own data.

    `pool_budget`: bytes, such as 4000000000 or "4GiB", beyond which the models of a pool (FedMR), or all replies where a method
    needs them together, lie in files of the run, of which the system keeps in memory what it has room for. None: in memory.

    `clock`: how long clients take, and how long the server waits for them. By default no time is simulated.
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

    def __post_init__(self) -> None:
        require_fields(self)
        if self.clock.over_selection and self.participation_mode == "poisson":
            raise InvalidValue("clock.over_selection: a poisson round has no number of replies to wait for")

    def newcomers(self, clients: int) -> int:
        """Return how many of the clients never train."""
        return _floor(self.new_clients * clients)

    def participants(self, trainers: int) -> int:
        """Return how many of the clients that train do so in one round."""
        return max(1, _floor(self.participation * trainers))


def _floor(product: float) -> int:
    """floor, but 0.3 * 10 must give 3 although the product is 2.9999999999999996 in binary."""
    return int(product + 1e-9)
