"""Where the random choices of an exchange come from: a peer's own secret chance, or a run's named streams."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Draws(Protocol):
    """A source of uniform whole numbers."""

    def below(self, bound: int) -> int:
        """A uniform number of 0 .. bound - 1."""


class SecretDraws:
    """The operating system's randomness: nobody else can know or repeat what a peer chose."""

    def below(self, bound: int) -> int:
        return secrets.randbelow(bound)


class StreamDraws:
    """The numbers of a torch generator: whoever knows its seed knows the choices."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def below(self, bound: int) -> int:
        import torch  # secret choices do without

        return int(torch.randint(bound, (), generator=self.generator))


Choices = Callable[[int, str], Draws]
"""(peer, purpose) -> where that peer draws what this purpose needs; the same purpose starts at the same place again."""


def secret_choices(peer: int, purpose: str) -> Draws:
    """For real sites: choices that no seed gives away."""
    return SecretDraws()


def stream_choices(stream: Callable[[str, int], torch.Generator]) -> Choices:
    """For simulations, and for real sites that rehearse one: choices from the streams (purpose, client) of a round, such as
    `Round.stream`. A server that knows the run's seed can repeat them and undo the exchange."""
    return lambda peer, purpose: StreamDraws(stream(purpose, peer))


def shuffled(items: Sequence[T], draws: Draws) -> list[T]:
    """The items in uniformly random order (Fisher and Yates)."""
    return sample(items, len(items), draws)


def sample(items: Sequence[T], count: int, draws: Draws) -> list[T]:
    """`count` distinct ones of the items, uniformly, in random order."""
    rest = list(items)
    for place in range(count):
        other = place + draws.below(len(rest) - place)
        rest[place], rest[other] = rest[other], rest[place]
    return rest[:count]
