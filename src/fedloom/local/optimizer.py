"""Updates of weights by SGD and other optimizers of torch, for one client or several."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.common.device import moved
from fedloom.common.rates import CONSTANT, rate_factor
from fedloom.common.training import Training
from fedloom.flat.layout import Unit
from fedloom.flat.module import Batch, Context, FlatModule, LossFn, data_loss
from fedloom.local.batches import LockStep

Correction = Callable[[Tensor, Tensor, Context], Tensor]
"""(weights `[k, T]`, gradient `[k, T]`, context) -> corrected gradient.

It may change the gradient in place.
"""

GradientFn = Callable[[Tensor, Batch, Context], tuple[Tensor, Tensor]]
"""(weights `[k, P]`, batch, context) -> loss `[k]` and gradient `[k, T]`.

It may call `Cohort.gradient` at any weights.
"""


class StepRates:
    """Learning rates of the next steps of k clients.

    Args:
        base: Learning rate of the round, or one rate per client, `[k]`.
        schedule: Local schedule. Its factor is multiplied with the rate.
        totals: Number of steps of each client, `[k]`.
    """

    def __init__(self, base: float | Tensor, schedule: str, totals: Tensor) -> None:
        count = len(totals)
        self.base = base.tolist() if isinstance(base, Tensor) else [base] * count
        self.schedule = schedule
        self.totals = totals.tolist()
        self.steps = [0] * count
        self.constant = schedule == CONSTANT and len(set(self.base)) == 1

    def equal(self, members: Sequence[int]) -> bool:
        """Return True if all remaining steps of these clients have the same rates."""
        return (
            self.constant
            or len({(self.base[k], self.steps[k], self.totals[k]) for k in members}) == 1
        )

    def step(self, members: Sequence[int]) -> float | list[float]:
        """Count a step of these clients. Return its rate, or one rate per client if they differ."""
        if self.constant:
            return self.base[0]
        rates = [
            self.base[k] * rate_factor(self.schedule, self.steps[k], self.totals[k])
            for k in members
        ]
        for k in members:
            self.steps[k] += 1
        return rates[0] if len(set(rates)) == 1 else rates


class LocalOptimizer:
    """Updates the weights of clients during one local training.

    A step computes the gradient of `loss_fn` or `gradient_fn`. Then it applies `correction`,
    clipping, weight decay and momentum. Optimizers of the user update tensors in the shapes of the
    model, with one optimizer per client.

    Args:
        flat_module: Computes gradients.
        settings: Settings of local training.
        rates: Learning rates of the clients.
        weights: Weights of all clients, `[k, P]`.
        only: Slices that are trained. None for all.
        loss_fn: Loss of one client.
        gradient_fn: Computes loss and gradient in place of `loss_fn`, or None.
        correction: Changes gradients, or None.
    """

    def __init__(
        self,
        flat_module: FlatModule,
        settings: Training,
        rates: StepRates,
        weights: Tensor,
        only: Unit | None,
        loss_fn: LossFn,
        gradient_fn: GradientFn | None,
        correction: Correction | None,
    ) -> None:
        self.flat_module = flat_module
        self.settings = settings
        self.rates = rates
        self.loss_fn = loss_fn
        self.gradient_fn = gradient_fn
        self.correction = correction
        trainable = flat_module.layout.trainable
        slices = [slice(0, trainable)] if only is None else only
        self.columns = tuple(
            slice(s.start, min(s.stop, trainable)) for s in slices if s.start < trainable
        )
        # Unless an option needs the gradient as one vector, each tensor is updated separately. This
        # saves the copies of autograd's gradients.
        sgd = settings.optimizer == "sgd"
        self.by_tensor = (
            sgd and settings.clip is None and gradient_fn is None and correction is None
        )
        self.shaped = self.by_tensor or settings.own_optimizer
        folds = self.by_tensor and rates.constant and loss_fn is data_loss
        self.folded = flat_module.folded(settings, rates.base[0]) if folds else None
        joint = flat_module.shortcuts.joint_optimizer
        self.optimizers = (
            None if sgd else TorchOptimizers(settings, rates.base[0], self._moved(weights), joint)
        )

    def take(self, group: LockStep, state: Mapping[str, Tensor], context: Context) -> list[Tensor]:
        """Train a group of clients on its batches.

        Args:
            group: The g clients and their batches.
            state: Weights `[g, P]` and, with momentum, velocity `[g, T]`. Changed in place.
            context: Tensors for the loss, `[g, ...]` by name.

        Returns:
            The losses of each step, `[g]`.
        """
        rows = state["weights"]
        velocity = state.get("velocity")
        step: Callable[[Batch], Tensor]
        if self.folded is not None:
            step = self.folded(rows, velocity)
        else:
            moved = self._moved(rows)
            members = group.members
            if self.optimizers is not None:
                update: Update = self.optimizers.of(members, moved, self.rates.equal(members))
            else:
                update = SGD(
                    self.settings, moved, [] if velocity is None else self._moved(velocity)
                )

            def step(batch: Batch) -> Tensor:
                loss, gradients = self._gradients(rows, batch, context)
                update(gradients, self.rates.step(members), batch.step == 0)
                return loss

        if self.flat_module.watch is not None:
            step = self.flat_module.watch(step, rows, group)
        return [step(batch) for batch in group.batches]

    def _moved(self, rows: Tensor) -> list[Tensor]:
        """Return views of the trained slices of `rows [g, T or more]`."""
        if self.shaped:
            return self.flat_module.pieces(rows)
        return [rows[:, columns] for columns in self.columns]

    def _gradients(
        self, rows: Tensor, batch: Batch, context: Context
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss `[g]`, and the gradient of each tensor of `_moved(rows)`."""
        if self.by_tensor:
            return self.flat_module.tensor_gradients(rows, batch, self.loss_fn, context)
        if self.gradient_fn is None:
            loss, gradient = self.flat_module.gradient(rows, batch, self.loss_fn, context)
        else:
            loss, gradient = self.gradient_fn(rows, batch, context)
        with torch.no_grad():
            if self.correction is not None:
                gradient = self.correction(
                    rows[:, : self.flat_module.layout.trainable], gradient, context
                )
            if self.settings.clip is not None:
                gradient = clipped(gradient, self.settings.clip)
        return loss, self._moved(gradient)


def clipped(gradient: Tensor, limit: float) -> Tensor:
    """Clip the norm of each client's gradient.

    Args:
        gradient: Gradients, `[k, T]`.
        limit: Largest norm.

    Returns:
        Gradients, `[k, T]`. Gradients with a smaller norm stay unchanged.
    """
    norm = gradient.norm(dim=1, keepdim=True)
    scaled: Tensor = gradient * (limit / (norm + 1e-6)).clamp(max=1.0)
    return scaled


Update = Callable[[Sequence[Tensor], float | list[float], bool], None]
"""(gradient of each tensor, one learning rate or one per client, True for the first step) -> None.

It updates the weights of some clients.
"""


class SGD:
    """SGD with momentum, without changes of the gradients.

    Args:
        settings: Settings of local training.
        weights: Tensors that are updated, `[g, ...]`.
        velocity: Velocity of each tensor, or an empty list without momentum.
    """

    def __init__(self, settings: Training, weights: list[Tensor], velocity: list[Tensor]) -> None:
        self.weights = weights
        self.velocity = velocity
        self.momentum = settings.momentum
        self.weight_decay = settings.weight_decay
        self.nesterov = bool(settings.optimizer_options.get("nesterov", False))
        self.dampening = float(settings.optimizer_options.get("dampening", 0.0))

    @torch.no_grad()
    def __call__(
        self, gradients: Sequence[Tensor], rate: float | list[float], starts: bool
    ) -> None:
        step = list(gradients)
        if self.weight_decay:
            step = list(torch._foreach_add(step, self.weights, alpha=self.weight_decay))
        if self.momentum:
            if starts:
                torch._foreach_copy_(self.velocity, step)
            else:
                torch._foreach_mul_(self.velocity, self.momentum)
                torch._foreach_add_(self.velocity, step, alpha=1 - self.dampening)
            step = (
                list(torch._foreach_add(step, self.velocity, alpha=self.momentum))
                if self.nesterov
                else self.velocity
            )
        if not isinstance(rate, list):
            torch._foreach_add_(self.weights, step, alpha=-rate)
            return
        column = moved(torch.tensor(rate, dtype=step[0].dtype), step[0].device)
        for weights, direction in zip(self.weights, step, strict=True):
            weights.sub_(direction * column.view(-1, *[1] * (direction.dim() - 1)))


JOINT_WEIGHTS = 1 << 20
"""Largest number of weights of several clients that share one optimizer of torch on a CPU.

An optimizer reads the weights several times per step. If they do not fit into the caches, this is
slower than one optimizer per client. Relative to clients that train one after another, ten models
of 200,000 weights took 1.5 of the time with a joint optimizer and 1.3 with one optimizer per
client. Twenty models of 5,000 weights took 0.2 and 0.4.
"""


class TorchOptimizers:
    """New optimizers of torch for k clients.

    One joint optimizer serves all clients if this is allowed and faster: these optimizers treat
    every number in the same way. When clients train on different batches or with different rates,
    their optimizer states differ, so each client gets its own optimizer.

    Args:
        settings: Settings of local training.
        rate: Learning rate of the first step.
        tensors: Trained tensors of all clients, `[k, ...]`.
        joint: True if a joint optimizer is allowed.
    """

    def __init__(
        self, settings: Training, rate: float, tensors: Sequence[Tensor], joint: bool
    ) -> None:
        self.clients = len(tensors[0])
        joint = joint and self.clients > 1
        joint = joint and (
            tensors[0].is_cuda or sum(tensor.numel() for tensor in tensors) <= JOINT_WEIGHTS
        )
        self._joint = _Optimizer(settings, rate, tensors) if joint else None
        separate = range(0 if joint else self.clients)
        self._separate = [
            _Optimizer(settings, rate, [tensor[k] for tensor in tensors]) for k in separate
        ]

    def of(self, members: Sequence[int], tensors: Sequence[Tensor], equal_rates: bool) -> Update:
        """Return the update function of some clients.

        Args:
            members: Numbers of the g clients.
            tensors: Their tensors, `[g, ...]`.
            equal_rates: True if all their remaining steps have the same rates.

        Returns:
            A function that makes one step. It changes the tensors in place.
        """
        if self._joint is not None:
            if equal_rates and list(members) == list(range(self.clients)):
                self._joint.attach(tensors)
                return self._joint.step
            self._separate = [self._joint.of_row(k) for k in range(self.clients)]
            self._joint = None
        optimizers = [self._separate[k] for k in members]
        for row, optimizer in enumerate(optimizers):
            optimizer.attach([tensor[row] for tensor in tensors])

        def step(gradients: Sequence[Tensor], rate: float | list[float], starts: bool) -> None:
            for row, optimizer in enumerate(optimizers):
                client_rate = rate[row] if isinstance(rate, list) else rate
                optimizer.step([gradient[row] for gradient in gradients], client_rate, starts)

        return step


class _Optimizer:
    """An optimizer of torch for the tensors of k clients, `[k, ...]`, or of one client, `[...]`."""

    def __init__(self, settings: Training, rate: float, tensors: Sequence[Tensor]) -> None:
        self.settings = settings
        self.rate = rate
        self.tensors = [torch.nn.Parameter(tensor) for tensor in tensors]
        # Above 0: the rates of parameter groups are scaled relative to it.
        self.current = self.first = rate or settings.learning_rate
        self.optimizer = settings.torch_optimizer(self.tensors, self.first)
        self.group_rates = [group["lr"] for group in self.optimizer.param_groups]

    def attach(self, tensors: Sequence[Tensor]) -> None:
        """Update these tensors from now on, with the present state."""
        for parameter, tensor in zip(self.tensors, tensors, strict=True):
            parameter.data = tensor

    def step(self, gradients: Sequence[Tensor], rate: float | list[float], starts: bool) -> None:
        if rate != self.current:
            assert not isinstance(rate, list), "clients with different rates have an optimizer each"
            self._scale(rate)
        for parameter, gradient in zip(self.tensors, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    def _scale(self, rate: float) -> None:
        """Scale the learning rate of each parameter group, like the schedulers of torch."""
        for group, first in zip(self.optimizer.param_groups, self.group_rates, strict=True):
            group["lr"] = first / self.first * rate
        self.current = rate

    def of_row(self, k: int) -> "_Optimizer":
        """Return an optimizer for row k, with the state of this row."""
        optimizer = _Optimizer(
            self.settings, self.rate, [tensor.detach()[k] for tensor in self.tensors]
        )
        for all_rows, row in zip(self.tensors, optimizer.tensors, strict=True):
            state = self.optimizer.state[all_rows]
            optimizer.optimizer.state[row] = {
                name: _of_row(value, k, all_rows.shape) for name, value in state.items()
            }
        return optimizer


def _of_row(value: Any, k: int, shape: torch.Size) -> Any:
    """Return row k of a state with the parameter's shape, or a copy of a state of another shape."""
    if not isinstance(value, Tensor):
        return value
    return (value[k] if value.shape == shape else value).clone()
