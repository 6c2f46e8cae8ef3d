"""How a gradient moves the weights: SGD, and the other optimisers of torch, for one client or for several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.flat.layout import Unit
from fedloom.flat.module import Batch, Objective, Replica, cross_entropy
from fedloom.training import Training

Given = Mapping[str, Tensor]
"""What a method hands to its hooks: named tensors with one row a client, `[k, ...]`."""

Correction = Callable[[Tensor, Tensor, Given], Tensor]
"""(weights `[k, T]`, gradient `[k, T]`, given) -> the gradient to use; it may change the gradient in place."""

Slope = Callable[[Tensor, Batch, Given], tuple[Tensor, Tensor]]
"""(weights `[k, P]`, batch, given) -> loss `[k]` and the gradient `[k, T]` to use, from `Cohort.gradient` wherever the method
wants it taken."""

Update = Callable[[Tensor, bool], None]
"""(gradient `[k, T]`, whether it is the clients' first) -> the weights are moved in place."""


class Descent:
    """One local training: how each batch moves the rows of the clients whose it is.

    Per step the gradient of `objective` (or what `slope` gives in its place), then `correction`, clipping, weight decay and
    momentum as the settings say. `weights [k, P]` are those of the whole cohort.
    """

    def __init__(
        self,
        replica: Replica,
        settings: Training,
        rate: float,
        weights: Tensor,
        only: Unit | None,
        objective: Objective,
        slope: Slope | None,
        correction: Correction | None,
    ) -> None:
        self.replica, self.settings, self.rate = replica, settings, rate
        self.objective, self.slope, self.correction = objective, slope, correction
        self.trainable = replica.layout.trainable
        self.parts = movable(only, self.trainable)
        # Where nothing looks at the whole gradient, each tensor is updated from where autograd left its gradient.
        self.plain = settings.optimiser == "sgd" and settings.clip is None and slope is None and correction is None
        self.fold = replica.folded(settings, rate) if self.plain and objective is cross_entropy else None
        self.optimisers: TorchOptimisers | None = None
        if settings.optimiser != "sgd":
            self.optimisers = TorchOptimisers(settings, rate, weights[:, : self.trainable], self.parts)

    def over(self, members: Sequence[int], state: Mapping[str, Tensor], given: Given) -> Callable[[Batch], Tensor]:
        """The step of the clients at the places `members`: a batch to its loss `[g]`. It moves their rows of the state, `weights
        [g, P]` and with momentum `velocity [g, T]`."""
        rows, velocity = state["weights"], state.get("velocity")
        fold = self.fold
        if fold is not None:
            return lambda batch: fold(rows, velocity, batch)
        if self.plain:
            return self._by_tensor(rows, velocity, given)
        return self._by_row(rows, self._update(members, rows[:, : self.trainable], velocity), given)

    def _by_tensor(self, rows: Tensor, velocity: Tensor | None, given: Given) -> Callable[[Batch], Tensor]:
        replica, objective = self.replica, self.objective
        velocities = [] if velocity is None else replica.pieces(velocity)
        apply = sgd(self.settings, self.rate, replica.pieces(rows), velocities)

        def step(batch: Batch) -> Tensor:
            loss, gradients = replica.tensor_gradients(rows, batch, objective, given)
            apply(gradients, batch.step == 0)
            return loss

        return step

    def _by_row(self, rows: Tensor, update: Update, given: Given) -> Callable[[Batch], Tensor]:
        trainable, limit, correction = rows[:, : self.trainable], self.settings.clip, self.correction

        def step(batch: Batch) -> Tensor:
            if self.slope is None:
                loss, gradient = self.replica.gradient(rows, batch, self.objective, given)
            else:
                loss, gradient = self.slope(rows, batch, given)
            with torch.no_grad():
                if correction is not None:
                    gradient = correction(trainable, gradient, given)
                if limit is not None:
                    gradient = clipped(gradient, limit)
                update(gradient, batch.step == 0)
            return loss

        return step

    def _update(self, members: Sequence[int], weights: Tensor, velocity: Tensor | None) -> Update:
        if self.optimisers is not None:
            return self.optimisers.over(members, weights)
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
    nesterov = bool(settings.optimiser_options.get("nesterov", False))
    dampening = float(settings.optimiser_options.get("dampening", 0.0))

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
"""Weights of several clients that an optimiser of torch moves at a time on a CPU. It passes over them several times in a step,
slower than client by client where not all fit the caches: in times of rows, ten models of 200,000 took 1.5 together, 1.3 apart;
twenty of 5,000 took 0.2 and 0.4."""


class TorchOptimisers:
    """A fresh optimiser of torch for each client, over the `parts` of its row of `weights [k, T]` that move.

    It is one for all of them where that is faster, since these optimisers treat every number alike, until a batch is not
    everybody's: from then on what each keeps of its steps differs.
    """

    def __init__(self, settings: Training, rate: float, weights: Tensor, parts: Unit) -> None:
        self.parts = parts
        self.clients = len(weights)
        self._together = _Optimiser(settings, rate, [weights[:, part] for part in parts])
        together = self.clients == 1 or weights.is_cuda or weights.numel() <= TOGETHER
        self._apart = [] if together else self._split()

    def over(self, members: Sequence[int], rows: Tensor) -> Update:
        """The update of `rows [g, T]`, which are those of the clients at the places `members`."""
        if not self._apart and list(members) == list(range(self.clients)):
            pairs = [(self._together, slice(None))]
        else:
            self._apart = self._apart or self._split()
            pairs = [(self._apart[k], slice(place, place + 1)) for place, k in enumerate(members)]
        for optimiser, place in pairs:
            optimiser.lie_in([rows[place, part] for part in self.parts])

        def apply(gradient: Tensor, first: bool) -> None:
            for optimiser, place in pairs:
                optimiser.step([gradient[place, part] for part in self.parts])

        return apply

    def _split(self) -> list[_Optimiser]:
        apart = [self._together.of_row(k) for k in range(self.clients)]
        self._together.optimiser.state.clear()
        return apart


class _Optimiser:
    """An optimiser of torch and the tensors `[k, n]` that it moves."""

    def __init__(self, settings: Training, rate: float, tensors: Sequence[Tensor]) -> None:
        self.settings, self.rate = settings, rate
        self.tensors = [torch.nn.Parameter(tensor) for tensor in tensors]
        self.optimiser = _torch_optimiser(settings, rate, self.tensors)

    def lie_in(self, tensors: Sequence[Tensor]) -> None:
        """Move these from now on."""
        for own, tensor in zip(self.tensors, tensors, strict=True):
            own.data = tensor

    def step(self, gradients: Sequence[Tensor]) -> None:
        for own, gradient in zip(self.tensors, gradients, strict=True):
            own.grad = gradient
        self.optimiser.step()

    def of_row(self, k: int) -> _Optimiser:
        """The optimiser of row k alone, with what this one keeps for it."""
        one = _Optimiser(self.settings, self.rate, [tensor.detach()[k : k + 1] for tensor in self.tensors])
        for all_rows, row in zip(self.tensors, one.tensors, strict=True):
            kept = self.optimiser.state[all_rows]
            one.optimiser.state[row] = {name: _of_row(value, k, all_rows.shape) for name, value in kept.items()}
        return one


def _of_row(value: Any, k: int, shape: torch.Size) -> Any:
    """Row k of what has a number for each weight, a copy of what is the same for all."""
    if not isinstance(value, Tensor):
        return value
    return (value[k : k + 1] if value.shape == shape else value).clone()


def _torch_optimiser(settings: Training, rate: float, tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    known = {name.lower(): name for name in dir(torch.optim)}
    kind = getattr(torch.optim, known[settings.optimiser])
    options = dict(settings.optimiser_options)
    if settings.momentum and settings.optimiser == "rmsprop":
        options["momentum"] = settings.momentum
    if settings.weight_decay:
        options["weight_decay"] = settings.weight_decay
    optimiser: torch.optim.Optimizer = kind(tensors, lr=rate, **options)
    return optimiser
