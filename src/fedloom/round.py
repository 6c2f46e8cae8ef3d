"""One round as both halves of a method see it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedloom.randomness import stream

SIMULATED = ("closes",)
"""Fields of a round that mean nothing at real sites, which are not told them."""


@dataclass(frozen=True)
class Round:
    """Round `number` (from 1) of `rounds`, with `participants` of `clients` taking part.

    `learning_rate` is this round's, `rate_change` that divided by the one of the round before;
    `initial_learning_rate` is that of round 1. `selected` lists the clients that train and upload,
    in the order of their slots; it is empty until the selection has been made. In a `poisson` round
    each client takes part by itself, and `participants` are those expected. Replies that the
    simulated clock has later than second `closes` are not waited for.
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
        """A new generator of the random stream that belongs to (seed, this round, client, purpose)."""
        return stream(self.seed, purpose, round=self.number, client=client)

    def at(self, number: int) -> "Round":
        """Another round of the same run, before its selection, for drawing ahead what it will draw.
        Its learning rate stays.
        """
        return replace(self, number=number, selected=())

    def on_time(
        self, finish: Sequence[float], clients: Sequence[int], awaited: int, began: float
    ) -> tuple[list[int], float]:
        """Return the indices of the first `awaited` replies that arrive until `closes`, and when
        the server goes on.

        `finish` says when the reply of each of `clients` arrives, and `began` when the server began
        to wait. Of simultaneous replies those of lower-numbered clients come first.
        """
        order = sorted(range(len(finish)), key=lambda index: (finish[index], clients[index]))
        taken = sorted(index for index in order[:awaited] if finish[index] <= self.closes)
        waits = math.isfinite(self.closes) and len(taken) < min(awaited, len(order))
        return taken, self.closes if waits else max([began, *(finish[index] for index in taken)])
