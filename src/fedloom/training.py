"""How a client trains: the settings of its local SGD, and the order of its batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedloom.config.expression import show
from fedloom.config.fields import BelowOne, Count, NonNegative, Positive, Share, require_fields
from fedloom.errors import InvalidValue, quoted, suggestion

Optimizer = Literal[
    "sgd", "adam", "adamw", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "rprop", "asgd"
]  # fmt: skip
"""Optimizers that treat every number alike, so that one flat tensor gives what separate tensors would."""

_TORCH_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
    )
}  # fmt: skip

_NOT_OPTIONS = (
    "params", "lr", "momentum", "weight_decay", "maximize", "foreach", "fused", "capturable", "differentiable",
)  # fmt: skip
"""Arguments of torch's optimizers that are settings of their own here, or say how to compute and not what."""


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
        if self.optimizer != "sgd" or self.optimizer_options:
            self._require_optimizer()

    def _require_optimizer(self) -> None:
        """Raise `InvalidValue` unless torch's optimizer takes these settings, and each of them has an effect."""
        known = inspect.signature(_TORCH_OPTIMIZERS[self.optimizer]).parameters
        for name in ("momentum", "weight_decay"):
            if getattr(self, name) and name not in known:
                others = [
                    kind for kind, make in _TORCH_OPTIMIZERS.items() if name in inspect.signature(make).parameters
                ]
                raise InvalidValue(f"{name} is not for {self.optimizer} but for {', '.join(others)}")
        allowed = [name for name in known if name not in _NOT_OPTIONS]
        for name, value in self.optimizer_options.items():
            if name not in allowed:
                raise InvalidValue(
                    f"optimizer_options: {self.optimizer} has no option {quoted(name)}:{suggestion(name, allowed)} "
                    f"(it has: {', '.join(allowed)})"
                )
            wanted = known[name].default
            plain = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(one, bool) != isinstance(wanted, bool) or not _is_finite(one) for one in plain):
                raise InvalidValue(f"optimizer_options: {name} must be like {show(wanted)}, not {quoted(value, show)}")
        if self.optimizer == "sgd" and not self.momentum and any(self.optimizer_options.values()):
            raise InvalidValue(
                f"optimizer_options: {' and '.join(self.optimizer_options)} of sgd do nothing without momentum"
            )
        try:
            weight = nn.Parameter(torch.ones(1))
            optimizer = self.torch_optimizer([weight], self.learning_rate)
            weight.grad = torch.ones(1)
            optimizer.step()
        except Exception as error:
            raise InvalidValue(
                f"optimizer_options: {self.optimizer} refuses {quoted(self.optimizer_options, show)}: {error}"
            ) from None

    def torch_optimizer(self, parameters: Sequence[Tensor], rate: float) -> torch.optim.Optimizer:
        """torch's optimizer of these settings, at a learning rate of its own."""
        kind = _TORCH_OPTIMIZERS[self.optimizer]
        known = inspect.signature(kind).parameters
        settings = {name: getattr(self, name) for name in ("momentum", "weight_decay") if name in known}
        return kind(parameters, lr=rate, **settings, **self.optimizer_options)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What forward and loss compute in, where that is another type than the weights'."""
        return None if self.autocast == "none" else torch.bfloat16

    def local_steps(self, samples: Tensor, smallest: int = 1) -> Tensor:
        """Local steps in a round of clients with so many samples, `[k]`; batches smaller than `smallest` are skipped. Of a mean
        number of samples, which may be a fraction, the last batch counts wherever it has a part of a sample."""
        size = samples if self.batch_size is None else samples.clamp(max=self.batch_size)
        whole = (samples / size.clamp_min(1)).floor()
        short = (samples - whole * size > smallest - 1) & (not self.drop_last)
        steps = self.epochs * (whole + short) if self.steps is None else torch.full_like(whole, self.steps)
        return torch.where(size < smallest, 0, steps)

    def rate(self, round: int) -> float:
        """Learning rate of a round (from 1)."""
        return self.learning_rate * self.decay ** (round - 1)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


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
