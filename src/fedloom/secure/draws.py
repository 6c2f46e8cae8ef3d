"""Random choices of an exchange: from the operating system, or from a run's named streams."""

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
"""(peer, purpose) -> the source from which that peer draws for this purpose; the same purpose repeats the same numbers."""


def secret_choices(peer: int, purpose: str) -> Draw:
    """Draw from the operating system, for real sites: nobody can repeat it and no seed gives it away."""
    return secrets.randbelow


def stream_choices(stream: Callable[[str, int], torch.Generator]) -> Choices:
    """Return choices from the streams (purpose, client) of a round, such as `Round.stream`, for simulations and rehearsals. A
    server that knows the run's seed can repeat them and undo the exchange."""
    return lambda peer, purpose: stream_draw(stream(purpose, peer))


def stream_draw(generator: torch.Generator) -> Draw:
    """Return a source that draws from a torch generator."""
    import torch  # secret choices do without

    return lambda bound: int(torch.randint(bound, (), generator=generator))


def sample(items: Sequence[T], count: int, draw: Draw) -> list[T]:
    """Draw `count` distinct items, uniformly, in random order (Fisher and Yates)."""
    shuffled = list(items)
    for index in range(count):
        partner = index + draw(len(shuffled) - index)
        shuffled[index], shuffled[partner] = shuffled[partner], shuffled[index]
    return shuffled[:count]
