"""Where the random choices of an exchange come from: a peer's own secret chance, or a run's named streams."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Draw = Callable[[int], int]
"""A source of uniform whole numbers: `draw(bound)` is one of 0 .. bound - 1."""

Choices = Callable[[int, str], Draw]
"""(peer, purpose) -> where that peer draws what this purpose needs; the same purpose starts at the same place again."""


def secret_choices(peer: int, purpose: str) -> Draw:
    """For real sites: the operating system's randomness, which nobody can repeat and no seed gives away."""
    return secrets.randbelow


def stream_choices(stream: Callable[[str, int], torch.Generator]) -> Choices:
    """For simulations, and for real sites that rehearse one: choices from the streams (purpose, client) of a round, such as
    `Round.stream`. A server that knows the run's seed can repeat them and undo the exchange."""
    return lambda peer, purpose: stream_draw(stream(purpose, peer))


def stream_draw(generator: torch.Generator) -> Draw:
    """The numbers of a torch generator."""
    import torch  # secret choices do without

    return lambda bound: int(torch.randint(bound, (), generator=generator))


def sample(items: Sequence[T], count: int, draw: Draw) -> list[T]:
    """`count` distinct ones of the items, uniformly, in random order (Fisher and Yates)."""
    rest = list(items)
    for place in range(count):
        other = place + draw(len(rest) - place)
        rest[place], rest[other] = rest[other], rest[place]
    return rest[:count]
