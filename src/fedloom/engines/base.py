"""What an engine is: a place where cohorts run. It is given inboxes and gives replies back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message
from fedloom.errors import RefusedReply
from fedloom.round import Round


@dataclass(frozen=True)
class Order:
    """One client's work in a round: its number, its slot (None: it trains without uploading) and its inbox, one row each."""

    client: int
    slot: int | None
    inbox: Message


@dataclass(frozen=True)
class Reply:
    """One client's answer: named tensors without a client axis, and figures about its work."""

    order: Order
    tensors: Mapping[str, Tensor]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Fault:
    """One client that did not answer, or whose answer was refused, and why."""

    order: Order
    reason: str
    error: Exception | None = None
    diverged: bool = False


class Engine(Protocol):
    """Runs the client half of a method. Results may come in any order; the federation puts them in theirs."""

    def train(self, algorithm: Algorithm, round: Round, orders: Sequence[Order]) -> Iterator[Reply | Fault]:
        """Let every client of `orders` train."""

    def memory(self) -> dict[str, Tensor]:
        """What the clients remember, for a checkpoint (empty where sites keep it themselves)."""

    def restore_memory(self, memory: dict[str, Tensor]) -> None:
        """Take back what `memory` returned."""

    def close(self) -> None:
        """Give back what the engine holds."""


def inspect_reply(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `RefusedReply` unless a reply has exactly the expected names and shapes, floats or integers, all finite."""
    if tensors.keys() != expected.keys():
        raise RefusedReply(f"tensors {sorted(tensors)} where {sorted(expected)} are expected")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            raise RefusedReply(f"{name!r} has shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.is_complex():
            raise RefusedReply(f"{name!r} holds complex numbers")
        if (
            tensor.is_floating_point()
            and not bool(torch.isfinite(tensor.sum()))
            and not bool(torch.isfinite(tensor).all())
        ):
            raise RefusedReply(f"{name!r} is not finite")
