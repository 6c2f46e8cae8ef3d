"""How a client trains: the settings of its local SGD, and the order of its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.config.fields import BelowOne, Count, NonNegative, Positive, Share, require_fields
from fedloom.errors import InvalidValue

Optimizer = Literal[
    "sgd", "adam", "adamw", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "rprop", "asgd"
]  # fmt: skip
"""Optimizers that treat every number alike, so that one flat tensor gives what separate tensors would."""


@dataclass(frozen=True)
class Training:
    """Settings of local training (FedAvg, algorithm 1).

    In round t the learning rate is `learning_rate * decay**(t - 1)`. The optimizer starts fresh in each round, so no momentum
    survives one. Per step: g = gradient (with a method's correction), clipped to norm `clip`, plus `weight_decay * w`;
    v = momentum * v + g; w = w - learning rate * v. (Clipping comes before weight decay, as in torch and the reference codes.)
    """

    learning_rate: Positive = 0.01
    momentum: BelowOne = 0.0
    weight_decay: NonNegative = 0.0
    decay: Share = 1.0  # of the learning rate, per round
    epochs: Count = 1
    steps: Count | None = None  # local steps instead of epochs
    batch_size: Count | None = 50  # None: all samples of the client in one batch
    drop_last: bool = False  # leave out the last batch of an epoch when it is short
    clip: Positive | None = None
    optimizer: Optimizer = "sgd"
    optimizer_options: dict[str, Any] = field(default_factory=dict)  # further arguments of the torch optimizer
    augmentation: Literal["none", "flip_crop"] = "none"  # with p = 0.5 each, a flip and a random crop with padding 4
    autocast: Literal["none", "bfloat16"] = "none"  # what forward and loss compute in; weights keep their own type

    def __post_init__(self) -> None:
        require_fields(self)
        if self.optimizer == "sgd" and self.optimizer_options.keys() - {"nesterov", "dampening"}:
            raise InvalidValue(
                f"optimizer_options of sgd are nesterov and dampening, not {sorted(self.optimizer_options)}"
            )

    def rate(self, round: int) -> float:
        """Learning rate of a round (from 1)."""
        return self.learning_rate * self.decay ** (round - 1)


def epoch_orders(
    samples: int,
    generator: torch.Generator | None,
    *,
    batch_size: int | None,
    epochs: int = 1,
    steps: int | None = None,
    drop_last: bool = False,
    smallest: int = 1,
) -> Iterator[tuple[Tensor, list[int]]]:
    """For each epoch the order of the samples, shuffled anew from `generator` (None: as they lie), and the batches' sizes.

    With `steps`, epochs follow one another until that many batches were given; otherwise `epochs` of them. Batches smaller
    than `smallest` are skipped (batch norm cannot normalise a single sample). A client with fewer samples than one batch
    keeps its only batch even with `drop_last`, so that it trains at all.
    """
    size = samples if batch_size is None else min(batch_size, samples)
    if samples < max(smallest, 1):
        return
    sizes = [size] * (samples // size)
    rest = samples - sum(sizes)
    if rest >= max(smallest, 1) and not drop_last:
        sizes.append(rest)
    sizes = [one for one in sizes if one >= smallest]
    remaining = epochs * len(sizes) if steps is None else steps
    while remaining > 0 and sizes:
        order = torch.arange(samples) if generator is None else torch.randperm(samples, generator=generator)
        given = sizes[:remaining]
        yield order[: sum(given)], given
        remaining -= len(given)
