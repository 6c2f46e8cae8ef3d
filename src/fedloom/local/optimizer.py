"""How a gradient moves the weights: SGD, and the other optimizers of torch, for one client or for several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.flat.layout import Unit
from fedloom.flat.module import Batch, FlatModule, Objective, cross_entropy
from fedloom.training import Training

Context = Mapping[str, Tensor]
"""What a method hands to its hooks: named tensors with one row a client, `[k, ...]`."""

Correction = Callable[[Tensor, Tensor, Context], Tensor]
"""(weights `[k, T]`, gradient `[k, T]`, given) -> the gradient to use; it may change the gradient in place."""

GradientFn = Callable[[Tensor, Batch, Context], tuple[Tensor, Tensor]]
"""(weights `[k, P]`, batch, given) -> loss `[k]` and the gradient `[k, T]` to use, from `Cohort.gradient` wherever the method
wants it taken."""

Update = Callable[[Tensor, bool], None]
"""(gradient `[k, T]`, whether it is the clients' first) -> the weights are moved in place."""


class LocalOptimizer:
    """One local training: how each batch moves the rows of the clients whose it is.

    Per step the gradient of `objective` (or what `gradient_fn` gives in its place), then `correction`, clipping, weight decay and
    momentum as the settings say. `weights [k, P]` are those of the whole cohort.
    """

    def __init__(
        self,
        flat_module: FlatModule,
        settings: Training,
        rate: float,
        weights: Tensor,
        only: Unit | None,
        objective: Objective,
        gradient_fn: GradientFn | None,
        correction: Correction | None,
    ) -> None:
        self.flat_module, self.settings, self.rate = flat_module, settings, rate
        self.objective, self.gradient_fn, self.correction = objective, gradient_fn, correction
        self.trainable = flat_module.layout.trainable
        self.parts = movable(only, self.trainable)
        # Where nothing looks at the whole gradient, each tensor is updated from where autograd left its gradient.
        self.plain = (
            settings.optimizer == "sgd" and settings.clip is None and gradient_fn is None and correction is None
        )
        self.fold = flat_module.folded(settings, rate) if self.plain and objective is cross_entropy else None
        self.optimizers: TorchOptimizers | None = None
        if settings.optimizer != "sgd":
            self.optimizers = TorchOptimizers(settings, rate, weights[:, : self.trainable], self.parts)

    def over(self, members: Sequence[int], state: Mapping[str, Tensor], context: Context) -> Callable[[Batch], Tensor]:
        """The step of the clients at the places `members`: a batch to its loss `[g]`. It moves their rows of the state, `weights
        [g, P]` and with momentum `velocity [g, T]`."""
        rows, velocity = state["weights"], state.get("velocity")
        fold = self.fold
        if fold is not None:
            return lambda batch: fold(rows, velocity, batch)
        if self.plain:
            return self._by_tensor(rows, velocity, context)
        return self._by_row(rows, self._update(members, rows[:, : self.trainable], velocity), context)

    def _by_tensor(self, rows: Tensor, velocity: Tensor | None, context: Context) -> Callable[[Batch], Tensor]:
        flat_module, objective = self.flat_module, self.objective
        velocities = [] if velocity is None else flat_module.pieces(velocity)
        apply = sgd(self.settings, self.rate, flat_module.pieces(rows), velocities)

        def step(batch: Batch) -> Tensor:
            loss, gradients = flat_module.tensor_gradients(rows, batch, objective, context)
            apply(gradients, batch.step == 0)
            return loss

        return step

    def _by_row(self, rows: Tensor, update: Update, context: Context) -> Callable[[Batch], Tensor]:
        trainable, limit, correction = rows[:, : self.trainable], self.settings.clip, self.correction

        def step(batch: Batch) -> Tensor:
            if self.gradient_fn is None:
                loss, gradient = self.flat_module.gradient(rows, batch, self.objective, context)
            else:
                loss, gradient = self.gradient_fn(rows, batch, context)
            with torch.no_grad():
                if correction is not None:
                    gradient = correction(trainable, gradient, context)
                if limit is not None:
                    gradient = clipped(gradient, limit)
                update(gradient, batch.step == 0)
            return loss

        return step

    def _update(self, members: Sequence[int], weights: Tensor, velocity: Tensor | None) -> Update:
        if self.optimizers is not None:
            return self.optimizers.over(members, weights)
        parts = self.parts
        velocities = [] if velocity is None else [velocity[:, part] for part in parts]
        apply = sgd(self.settings, self.rate, [weights[:, part] for part in parts], velocities)
        return lambda gradient, first: apply([gradient[:, part] for part in parts], first)


def clipped(gradient: Tensor, limit: float) -> Tensor:
    """Each row of `[k, T]` scaled down to a norm of at most `limit`."""
    norm = gradient.norm(dim=1, keepdim=True)
    scaled: Tensor = gradient * (limit / (norm + 1e-6)).clamp(max=1.0)
    return scaled


def movable(only: Unit | None, trainable: int) -> Unit:
    """The slices of the parameters that move."""
    return (slice(0, trainable),) if only is None else tuple(part for part in only if part.stop <= trainable)


def sgd(
    settings: Training, rate: float, weights: list[Tensor], velocity: list[Tensor]
) -> Callable[[Sequence[Tensor], bool], None]:
    """SGD over `weights` as a function that applies one gradient for each in place (it may overwrite them).

    With momentum there is a `velocity` for each; what it holds before the first gradient does not matter.
    """
    momentum = settings.momentum
    nesterov = bool(settings.optimizer_options.get("nesterov", False))
    dampening = float(settings.optimizer_options.get("dampening", 0.0))

    @torch.no_grad()
    def apply(gradients: Sequence[Tensor], first: bool) -> None:
        step = list(gradients)
        if settings.weight_decay:
            torch._foreach_add_(step, weights, alpha=settings.weight_decay)
        if momentum:
            if first:
                torch._foreach_copy_(velocity, step)
            else:
                torch._foreach_mul_(velocity, momentum)
                torch._foreach_add_(velocity, step, alpha=1 - dampening)
            step = list(torch._foreach_add(step, velocity, alpha=momentum) if nesterov else velocity)
        torch._foreach_add_(weights, step, alpha=-rate)

    return apply


TOGETHER = 1 << 20
"""Weights of several clients that an optimizer of torch moves at a time on a CPU. It passes over them several times in a step,
slower than client by client where not all fit the caches: in times of rows, ten models of 200,000 took 1.5 together, 1.3 apart;
twenty of 5,000 took 0.2 and 0.4."""


class TorchOptimizers:
    """A fresh optimizer of torch for each client, over the `parts` of its row of `weights [k, T]` that move.

    It is one for all of them where that is faster, since these optimizers treat every number alike, until a batch is not
    everybody's: from then on what each keeps of its steps differs.
    """

    def __init__(self, settings: Training, rate: float, weights: Tensor, parts: Unit) -> None:
        self.parts = parts
        self.clients = len(weights)
        self._together = _Optimizer(settings, rate, [weights[:, part] for part in parts])
        together = self.clients == 1 or weights.is_cuda or weights.numel() <= TOGETHER
        self._apart = [] if together else self._split()

    def over(self, members: Sequence[int], rows: Tensor) -> Update:
        """The update of `rows [g, T]`, which are those of the clients at the places `members`."""
        if not self._apart and list(members) == list(range(self.clients)):
            pairs = [(self._together, slice(None))]
        else:
            self._apart = self._apart or self._split()
            pairs = [(self._apart[k], slice(place, place + 1)) for place, k in enumerate(members)]
        for optimizer, place in pairs:
            optimizer.lie_in([rows[place, part] for part in self.parts])

        def apply(gradient: Tensor, first: bool) -> None:
            for optimizer, place in pairs:
                optimizer.step([gradient[place, part] for part in self.parts])

        return apply

    def _split(self) -> list[_Optimizer]:
        apart = [self._together.of_row(k) for k in range(self.clients)]
        self._together.optimizer.state.clear()
        return apart


class _Optimizer:
    """An optimizer of torch and the tensors `[k, n]` that it moves."""

    def __init__(self, settings: Training, rate: float, tensors: Sequence[Tensor]) -> None:
        self.settings, self.rate = settings, rate
        self.tensors = [torch.nn.Parameter(tensor) for tensor in tensors]
        self.optimizer = _torch_optimizer(settings, rate, self.tensors)

    def lie_in(self, tensors: Sequence[Tensor]) -> None:
        """Move these from now on."""
        for own, tensor in zip(self.tensors, tensors, strict=True):
            own.data = tensor

    def step(self, gradients: Sequence[Tensor]) -> None:
        for own, gradient in zip(self.tensors, gradients, strict=True):
            own.grad = gradient
        self.optimizer.step()

    def of_row(self, k: int) -> _Optimizer:
        """The optimizer of row k alone, with what this one keeps for it."""
        one = _Optimizer(self.settings, self.rate, [tensor.detach()[k : k + 1] for tensor in self.tensors])
        for all_rows, row in zip(self.tensors, one.tensors, strict=True):
            kept = self.optimizer.state[all_rows]
            one.optimizer.state[row] = {name: _of_row(value, k, all_rows.shape) for name, value in kept.items()}
        return one


def _of_row(value: Any, k: int, shape: torch.Size) -> Any:
    """Row k of what has a number for each weight, a copy of what is the same for all."""
    if not isinstance(value, Tensor):
        return value
    return (value[k : k + 1] if value.shape == shape else value).clone()


def _torch_optimizer(settings: Training, rate: float, tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    known = {name.lower(): name for name in dir(torch.optim)}
    kind = getattr(torch.optim, known[settings.optimizer])
    options = dict(settings.optimizer_options)
    if settings.momentum and settings.optimizer == "rmsprop":
        options["momentum"] = settings.momentum
    if settings.weight_decay:
        options["weight_decay"] = settings.weight_decay
    optimizer: torch.optim.Optimizer = kind(tensors, lr=rate, **options)
    return optimizer
