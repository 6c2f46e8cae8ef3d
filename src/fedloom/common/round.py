"""Description of one round, shared by both halves of a method."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedloom.common.randomness import stream

SIMULATED = ("closes",)
"""Fields of a round that have a meaning only in a simulation and are not sent to real sites."""


@dataclass(frozen=True)
class Round:
    """A round of a run, with its selected clients and learning rate.

    Attributes:
        number: Number of the round, from 1.
        rounds: Number of rounds of the run.
        seed: Seed of all random streams.
        clients: Number of clients.
        participants: Number of clients that take part; the expected number in a `poisson` round.
        learning_rate: Learning rate of this round.
        initial_learning_rate: Learning rate of round 1.
        rate_change: Learning rate of this round divided by the previous round's.
        selected: Clients that train and upload, in the order of their slots; empty before the
            selection.
        poisson: True if each client takes part independently of the others.
        closes: Simulated time in seconds; the server does not wait for later replies.
    """

    number: int
    rounds: int
    seed: int
    clients: int
    participants: int
    learning_rate: float
    initial_learning_rate: float
    rate_change: float = 1.0
    selected: tuple[int, ...] = ()
    poisson: bool = False
    closes: float = math.inf

    def stream(self, purpose: str, client: int = -1) -> torch.Generator:
        """Return a new generator of the stream of (seed, this round, client, purpose).

        Args:
            purpose: Name of the draw. Draws with different names are independent.
            client: Number of the client; -1 for draws of the server.

        Returns:
            A generator on the CPU, at the beginning of the stream.
        """
        return stream(self.seed, purpose, round=self.number, client=client)

    def at(self, number: int) -> "Round":
        """Return another round of the same run, before its selection, to draw its numbers ahead.

        Its learning rate is not changed.
        """
        return replace(self, number=number, selected=())

    def on_time(
        self, finish: Sequence[float], clients: Sequence[int], awaited: int, began: float
    ) -> tuple[list[int], float]:
        """Select the first `awaited` replies that arrive until `closes`.

        Replies that arrive at the same time are ordered by client number.

        Args:
            finish: Times at which replies arrive, in seconds.
            clients: The client of each reply.
            awaited: Largest number of replies.
            began: Time at which the server started to wait, in seconds.

        Returns:
            The indices of the selected replies, ascending, and the time at which the server
                continues.
        """
        order = sorted(range(len(finish)), key=lambda index: (finish[index], clients[index]))
        taken = sorted(index for index in order[:awaited] if finish[index] <= self.closes)
        waits = math.isfinite(self.closes) and len(taken) < min(awaited, len(order))
        return taken, self.closes if waits else max([began, *(finish[index] for index in taken)])
