"""How a client trains: the settings of its local SGD, and the order of its batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedloom.config.expression import show
from fedloom.config.fields import BelowOne, Count, ImportPath, NonNegative, Positive, Share, require_fields
from fedloom.config.plugins import found_at
from fedloom.config.rates import CONSTANT, build_rate_schedule, rate_factor
from fedloom.errors import FedloomError, InvalidValue, quoted, suggestion
from fedloom.round import Round

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

    In round t the learning rate is `learning_rate * decay**(t - 1)` times what `schedule` gives after t - 1 of all. Each of
    a client's local steps multiplies it by what `local_schedule` gives after so many of its steps of the round. A schedule is one
    of `config.rates`, such as `warmup(5, then=cosine)`, or `module:function`. The optimizer, a name or `module:Class`, starts
    fresh in each round, so no momentum survives one. Per step: g = gradient (with a method's correction), clipped to norm `clip`,
    plus `weight_decay * w`; v = momentum * v + g; w = w - learning rate * v. (Clipping comes before weight decay, as in torch and
    the reference codes.)
    """

    learning_rate: Positive = 0.01
    momentum: BelowOne = 0.0
    weight_decay: NonNegative = 0.0
    decay: Share = 1.0  # of the learning rate, per round
    schedule: str = CONSTANT
    local_schedule: str = CONSTANT
    epochs: Count = 1
    steps: Count | None = None  # local steps instead of epochs
    batch_size: Count | None = 50  # None: all samples of the client in one batch
    drop_last: bool = False  # leave out the last batch of an epoch when it is short
    clip: Positive | None = None
    optimizer: Optimizer | ImportPath = "sgd"
    optimizer_options: dict[str, Any] = field(default_factory=dict)  # further arguments of the optimizer
    augmentation: Literal["none", "flip_crop"] = "none"  # with p = 0.5 each, a flip and a random crop with padding 4
    autocast: Literal["none", "bfloat16"] = "none"  # what forward and loss compute in; weights keep their own type

    def __post_init__(self) -> None:
        require_fields(self)
        for name in ("schedule", "local_schedule"):
            try:
                build_rate_schedule(getattr(self, name))
            except FedloomError as error:
                raise InvalidValue(f"{name}: {error}") from None
        if self.optimizer != "sgd" or self.optimizer_options:
            self._require_optimizer()

    def _require_optimizer(self) -> None:
        """Raise `InvalidValue` unless the optimizer takes these settings, and each of them has an effect."""
        known = self._parameters()
        for name in ("momentum", "weight_decay"):
            if getattr(self, name) and name not in known:
                others = [
                    kind for kind, make in _TORCH_OPTIMIZERS.items() if name in inspect.signature(make).parameters
                ]
                raise InvalidValue(f"{name} is not for {self.optimizer} but for {', '.join(others)}")
        allowed = [name for name in known if name not in (("params", "lr") if self.own_optimizer else _NOT_OPTIONS)]
        anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
        for name, value in self.optimizer_options.items():
            if name not in allowed and anything:
                continue
            if name not in allowed:
                raise InvalidValue(
                    f"optimizer_options: {self.optimizer} has no option {quoted(name)}{suggestion(name, allowed)} "
                    f"(it has: {', '.join(allowed)})"
                )
            wanted = known[name].default
            if wanted is inspect.Parameter.empty or wanted is None:
                continue
            plain = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(one, bool) != isinstance(wanted, bool) or not _is_finite(one) for one in plain):
                raise InvalidValue(f"optimizer_options: {name} must be like {show(wanted)}, not {quoted(value, show)}")
        if self.optimizer == "sgd" and not self.momentum and any(self.optimizer_options.values()):
            raise InvalidValue(
                f"optimizer_options: {' and '.join(self.optimizer_options)} of sgd do nothing without momentum"
            )
        try:
            weight = nn.Parameter(torch.ones(2, 2))
            optimizer = self.torch_optimizer([weight], self.learning_rate)
            weight.grad = torch.ones(2, 2)
            optimizer.step()
        except Exception as error:
            raise InvalidValue(
                f"optimizer_options: {self.optimizer} refuses {quoted(self.optimizer_options, show)}: {error}"
            ) from None

    def torch_optimizer(self, parameters: Sequence[Tensor], rate: float) -> torch.optim.Optimizer:
        """The optimizer of these settings, at a learning rate of its own. One of the user's keeps its own default of momentum and
        weight decay where these are 0."""
        settings = {name: getattr(self, name) for name in ("momentum", "weight_decay") if name in self._parameters()}
        if self.own_optimizer:
            settings = {name: value for name, value in settings.items() if value}
        return self._optimizer_class()(parameters, lr=rate, **settings, **self.optimizer_options)

    @property
    def own_optimizer(self) -> bool:
        """Whether the optimizer is a class of the user's, which may look at whole tensors."""
        return ":" in self.optimizer

    def _optimizer_class(self) -> Callable[..., torch.optim.Optimizer]:
        if not self.own_optimizer:
            return _TORCH_OPTIMIZERS[self.optimizer]
        found = found_at(self.optimizer, "optimizer", "a name or 'module:Class'")
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise InvalidValue(f"optimizer {quoted(self.optimizer)} must be a subclass of torch.optim.Optimizer")
        if "lr" not in inspect.signature(found).parameters:
            raise InvalidValue(f"optimizer {quoted(self.optimizer)} must take the learning rate as lr")
        return found

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        """What the optimizer takes."""
        return inspect.signature(self._optimizer_class()).parameters

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

    def samples_seen(self, samples: int) -> int:
        """Samples that a client with so many passes through its model in a round."""
        size = samples if self.batch_size is None else min(samples, self.batch_size)
        return self.epochs * samples if self.steps is None else self.steps * size

    def rate(self, number: int, rounds: int) -> float:
        """Learning rate of round `number` (from 1) of so many. Raises `InvalidValue` where the schedule gives none."""
        factor = rate_factor(self.schedule, min(number, rounds) - 1, rounds)
        return self.learning_rate * self.decay ** (number - 1) * factor

    def same_rates(self, rounds: int, others: int) -> bool:
        """Whether runs of so many rounds have the same learning rates as far as both go."""
        return all(
            self.rate(number, rounds) == self.rate(number, others)
            for number in (() if self.schedule == CONSTANT else range(1, min(rounds, others) + 1))
        )

    def round_at(self, round: Round, number: int) -> Round:
        """Round `number` of the same run, before its selection."""
        rate, before = self.rate(number, round.rounds), self.rate(max(1, number - 1), round.rounds)
        return replace(round.at(number), learning_rate=rate, rate_change=rate / before)


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


def poisson_orders(
    samples: int, share: float, steps: int, uniforms: Callable[[int], Tensor]
) -> Iterator[tuple[Tensor, list[int]]]:
    """As `epoch_orders`, for batches that every sample enters by itself with probability `share`: their sizes vary, and may be 0.
    `uniforms(n)` draws n numbers in [0, 1)."""
    for _ in range(steps):
        drawn = (uniforms(samples) < share).nonzero()[:, 0]
        yield drawn, [len(drawn)]
