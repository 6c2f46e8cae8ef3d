"""Settings of local SGD, and the order of a client's batches."""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fedloom.common.description import Described
from fedloom.common.errors import FedloomError, InvalidValue, quoted, suggestion
from fedloom.common.expression import show
from fedloom.common.fields import (
    BelowOne,
    Count,
    NonNegative,
    Positive,
    Share,
    require_fields,
)
from fedloom.common.optimizers import Optimizer, optimizer_class
from fedloom.common.rates import CONSTANT, build_rate_schedule, rate_factor
from fedloom.common.round import Round

_NOT_OPTIONS = (
    "params", "lr", "momentum", "weight_decay", "maximize", "foreach", "fused", "capturable",
    "differentiable",
)  # fmt: skip
"""Arguments of torch's optimizers that are separate settings here, or only choose a code path."""


class PassOptions(TypedDict, total=False):
    """Length of a local training that a method may set. None takes the task's setting."""

    epochs: int | None
    steps: int | None
    batch_size: int | None
    drop_last: bool | None


@dataclass(frozen=True)
class Passes:
    """The length of a local training: `steps` steps, or else `epochs` passes over the samples.

    A client with fewer samples than one batch trains on this batch even with `drop_last`, so that
    it trains at all. Batches smaller than `smallest` are skipped, since batch norm cannot normalise
    a single sample.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = None
    drop_last: bool = False
    smallest: int = 1

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("steps", 0), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidValue(
                    f"{name} of local training must be at least {least}, not {value}"
                )

    def count(self, samples: Tensor) -> Tensor:
        """Return the steps `[k]` of clients with `samples [k]` samples.

        A mean number of samples may be a fraction: the last batch then counts if it has any part of
        a sample.
        """
        size = samples if self.batch_size is None else samples.clamp(max=self.batch_size)
        full = (samples / size.clamp_min(1)).floor()
        short = (samples - full * size > self.smallest - 1) & (not self.drop_last)
        steps = (
            self.epochs * (full + short)
            if self.steps is None
            else torch.full_like(full, self.steps)
        )
        return torch.where(size < self.smallest, 0, steps)

    def orders(
        self, samples: int, generator: torch.Generator | None, share: float = 1.0
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the order of the samples and the sizes of the batches of each epoch.

        Args:
            samples: Number of samples.
            generator: Shuffles each epoch anew; None leaves the samples in order.
            share: Share of the steps after which the training ends.

        Yields:
            Indices of samples, and the sizes of the batches into which they are cut.
        """
        size = samples if self.batch_size is None else min(self.batch_size, samples)
        if samples < max(self.smallest, 1):
            return
        sizes = [size] * (samples // size)
        short = samples - sum(sizes)
        if short >= max(self.smallest, 1) and not self.drop_last:
            sizes.append(short)
        sizes = [size for size in sizes if size >= self.smallest]
        steps = self.epochs * len(sizes) if self.steps is None else self.steps
        remaining = completed(steps, share)
        while remaining > 0 and sizes:
            order = (
                torch.arange(samples)
                if generator is None
                else torch.randperm(samples, generator=generator)
            )
            batches = sizes[:remaining]
            yield order[: sum(batches)], batches
            remaining -= len(batches)


def completed(steps: int, share: float) -> int:
    """Return a share of a number of steps, as a whole number and at least 1 of them."""
    return max(min(steps, 1), round(share * steps))


@dataclass(frozen=True, repr=False)
class Training(Described):
    """Settings of local training (FedAvg, algorithm 1).

    Per step: g = gradient (with a method's correction), clipped to norm `clip`, plus `weight_decay
    * w`; v = momentum * v + g; w = w - rate * v. Clipping comes before weight decay, as in PyTorch
    and the reference codes. The rate of a step is `learning_rate * decay**(round - 1)` times the
    factors of `schedule` and `local_schedule`. The optimizer starts fresh in each round, so
    momentum is not carried over to the next round.

    Args:
        learning_rate: Above 0.
        momentum: At least 0, below 1.
        weight_decay: At least 0.
        decay: Factor of the learning rate per round, in (0, 1].
        schedule: Learning rate over the rounds: a schedule of `config.rates`, such as `warmup(5,
            then=cosine)`, or `module:function`.
        local_schedule: Learning rate over a client's steps within a round, likewise.
        epochs: Passes over a client's samples per round.
        steps: Local steps per round, instead of epochs.
        batch_size: Samples per step; None for all samples of the client.
        drop_last: Leave out the last batch of an epoch if it is short.
        clip: Largest norm of the gradient.
        optimizer: A name such as `adam`, `module:Class`, or a class or function at the top level of
            a module, which becomes `module:Class`. A function takes the parameters and `lr`.
        optimizer_options: Further arguments of the optimizer.
        augmentation: `flip_crop` for a flip and a random crop with padding 4, with probability 0.5
            each.
        autocast: Type of the forward pass and the loss; weights keep their type.

    Raises:
        InvalidValue: A value is out of range, or the optimizer does not take these settings.
    """

    learning_rate: Positive = 0.01
    momentum: BelowOne = 0.0
    weight_decay: NonNegative = 0.0
    decay: Share = 1.0
    schedule: str = CONSTANT
    local_schedule: str = CONSTANT
    epochs: Count = 1
    steps: Count | None = None
    batch_size: Count | None = 50
    drop_last: bool = False
    clip: Positive | None = None
    optimizer: Optimizer = "sgd"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    augmentation: Literal["none", "flip_crop"] = "none"
    autocast: Literal["none", "bfloat16"] = "none"

    def __post_init__(self) -> None:
        require_fields(self)
        for name in ("schedule", "local_schedule"):
            try:
                build_rate_schedule(getattr(self, name))
            except FedloomError as error:
                raise InvalidValue(f"{name}: {error}") from None
        if self.optimizer != "sgd" or self.optimizer_options:
            self._require_optimizer()

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self._description().items())
        return f"Training({arguments})"

    def summary(self) -> str:
        """Return the settings in words, such as `learning_rate 0.1, epochs 1, batch_size 50`."""
        return ", ".join(f"{name} {value}" for name, value in self._description().items())

    def _description(self) -> dict[str, str]:
        """Return the main settings and all others that differ from their defaults."""
        length = "epochs" if self.steps is None else "steps"
        main = ("learning_rate", length, "batch_size")
        default = {one.name: one.default for one in fields(self)}
        default["optimizer_options"] = {}
        return {
            name: repr(value)
            for name, value in vars(self).items()
            if name in main or (name != "epochs" and value != default[name])
        }

    def _require_optimizer(self) -> None:
        """Raise `InvalidValue` unless the optimizer takes these settings and all have an effect."""
        parameters = self._parameters()
        for name in ("momentum", "weight_decay"):
            if getattr(self, name) and name not in parameters:
                raise InvalidValue(f"{self.optimizer} has no {name}: leave it at 0")
        reserved = ("params", "lr") if self.own_optimizer else _NOT_OPTIONS
        allowed = [name for name in parameters if name not in reserved]
        anything = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        for name, value in self.optimizer_options.items():
            if name not in allowed and not anything:
                reason = (
                    f"has no option {quoted(name)}{suggestion(name, allowed)} "
                    f"(it has: {', '.join(allowed)})"
                )
                raise InvalidValue(f"optimizer_options: {self.optimizer} {reason}")
            flag = name in allowed and isinstance(parameters[name].default, bool)
            if flag != isinstance(value, bool) or value in (math.inf, -math.inf):
                kind = "true or false" if flag else "finite and neither true nor false"
                raise InvalidValue(
                    f"optimizer_options: {name} must be {kind}, not {quoted(value, show)}"
                )
        try:
            weight = nn.Parameter(torch.ones(2, 2))
            optimizer = self.torch_optimizer([weight], self.learning_rate)
            weight.grad = torch.ones(2, 2)
            optimizer.step()
        except Exception as error:
            options = quoted(self.optimizer_options, show)
            raise InvalidValue(
                f"optimizer_options: {self.optimizer} refuses {options}: {error}"
            ) from None

    def torch_optimizer(self, parameters: Sequence[Tensor], rate: float) -> torch.optim.Optimizer:
        """Return an optimizer with these settings.

        Args:
            parameters: Tensors to train.
            rate: Learning rate.

        Returns:
            The optimizer. A user's class uses its default momentum and weight decay if these are 0
            here.

        Raises:
            InvalidValue: A user's function returned no optimizer.
        """
        settings = {
            name: getattr(self, name)
            for name in ("momentum", "weight_decay")
            if name in self._parameters()
        }
        if self.own_optimizer:
            settings = {name: value for name, value in settings.items() if value}
        make = optimizer_class(self._named_optimizer)
        optimizer = make(parameters, lr=rate, **settings, **self.optimizer_options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidValue(f"it returned {quoted(optimizer)}, not a torch.optim.Optimizer")
        return optimizer

    @property
    def own_optimizer(self) -> bool:
        """True for a user's class, which may depend on the shapes of tensors."""
        return ":" in self._named_optimizer

    @property
    def _named_optimizer(self) -> str:
        """The optimizer, which is text after the checks of `__post_init__`."""
        return cast(str, self.optimizer)

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(optimizer_class(self._named_optimizer)).parameters

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type of the forward pass and the loss, if it differs from the weights' type."""
        return None if self.autocast == "none" else torch.bfloat16

    def passes(self, *, smallest: int = 1, **options: Unpack[PassOptions]) -> Passes:
        """Return the length of a local training with a method's values in place of the settings.

        Args:
            smallest: Smallest batch that is not skipped.
            options: The method's values. `epochs` replaces `steps`. None takes the task's setting.

        Returns:
            The length, in epochs or steps.
        """
        length = Passes(self.epochs, self.steps, self.batch_size, self.drop_last, smallest)
        chosen: dict[str, Any] = {
            name: value for name, value in options.items() if value is not None
        }
        if "epochs" in chosen:
            chosen.setdefault("steps", None)
        return replace(length, **chosen) if chosen else length

    def local_steps(self, samples: Tensor, smallest: int = 1) -> Tensor:
        """Return the number of local steps in a round.

        Args:
            samples: Number of samples of each client, `[k]`.
            smallest: Smallest batch that is not skipped.

        Returns:
            Steps of each client, `[k]`.
        """
        return self.passes(smallest=smallest).count(samples)

    def samples_seen(self, samples: float) -> float:
        """Return the number of samples that pass through a client's model in a round."""
        size = samples if self.batch_size is None else min(samples, self.batch_size)
        return self.epochs * samples if self.steps is None else self.steps * size

    def rate(self, number: int, rounds: int) -> float:
        """Return the learning rate of round `number` (from 1).

        Args:
            number: Number of the round. After the last round the schedule's factor stays the same.
            rounds: Number of rounds of the run.

        Returns:
            The rate after the schedule and `decay`.

        Raises:
            InvalidValue: The schedule does not return a valid factor.
        """
        factor = rate_factor(self.schedule, min(number, rounds) - 1, rounds)
        return self.learning_rate * self.decay ** (number - 1) * factor

    def same_rates(self, rounds: int, total: int) -> bool:
        """Return True if runs of `rounds` and `total` rounds have equal rates in common rounds.

        Args:
            rounds: Length of one run, in rounds.
            total: Length of the other run.

        Returns:
            False if a schedule such as cosine gives a common round two different rates.
        """
        numbers = range(1, min(rounds, total) + 1)
        return self.schedule == CONSTANT or all(
            self.rate(k, rounds) == self.rate(k, total) for k in numbers
        )

    def round_at(self, round: Round, number: int) -> Round:
        """Return round `number` of the same run, before its selection.

        Args:
            round: Any round of the run.
            number: Number of the new round, from 1.

        Returns:
            The round, with its learning rate and the change of the rate since the round before.
        """
        rate = self.rate(number, round.rounds)
        previous = self.rate(max(1, number - 1), round.rounds)
        # a rate that has decayed to 0 stays 0

        change = rate / previous if previous else 1.0
        return replace(round.at(number), learning_rate=rate, rate_change=change)
