"""Updates of the weights by SGD and the other optimizers of torch, for one client or for several
side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.config.rates import CONSTANT, rate_factor
from fedloom.flat.device import moved
from fedloom.flat.layout import Unit
from fedloom.flat.module import Batch, Context, FlatModule, LossFn, data_loss
from fedloom.local.batches import LockStep
from fedloom.training import Training

Correction = Callable[[Tensor, Tensor, Context], Tensor]
"""(weights `[k, T]`, gradient `[k, T]`, context) -> the gradient to use; it may change the gradient
in place.
"""

GradientFn = Callable[[Tensor, Batch, Context], tuple[Tensor, Tensor]]
"""(weights `[k, P]`, batch, context) -> loss `[k]` and the gradient `[k, T]` to use, from
`Cohort.gradient` at any weights.
"""


class StepRates:
    """Learning rates of k clients' next steps: `base` times the factor of the local schedule for
    `totals [k]` steps.
    """

    def __init__(self, base: float | Tensor, schedule: str, totals: Tensor) -> None:
        count = len(totals)
        self.base = base.tolist() if isinstance(base, Tensor) else [base] * count
        self.schedule, self.totals, self.steps = schedule, totals.tolist(), [0] * count
        self.constant = schedule == CONSTANT and len(set(self.base)) == 1

    def alike(self, members: Sequence[int]) -> bool:
        """Return True if these clients' steps have the same rates from now on."""
        return (
            self.constant
            or len({(self.base[k], self.steps[k], self.totals[k]) for k in members}) == 1
        )

    def step(self, members: Sequence[int]) -> float | list[float]:
        """Return the rate of these clients' next step, or the rate of each, and count the step."""
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
    """One local training: each batch moves the rows of its clients.

    A step takes the gradient of `loss_fn` or `gradient_fn`, then applies `correction`, clipping,
    weight decay and momentum. `weights [k, P]` are the whole cohort's; `only` names what moves.
    Users' optimizers, one a client, move the model's shapes.
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
        self.flat_module, self.settings, self.rates = flat_module, settings, rates
        self.loss_fn, self.gradient_fn, self.correction = loss_fn, gradient_fn, correction
        trainable = flat_module.layout.trainable
        slices = [slice(0, trainable)] if only is None else only
        self.columns = tuple(
            slice(s.start, min(s.stop, trainable)) for s in slices if s.start < trainable
        )
        # If nothing needs the gradient as one vector, each tensor is updated from autograd's own
        # gradient.
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
        """Take the steps of a group, whose rows of the state move, and return the loss of each
        step, `[g]`.
        """
        rows, velocity = state["weights"], state.get("velocity")
        step: Callable[[Batch], Tensor]
        if self.folded is not None:
            step = partial(self.folded, rows, velocity)
        else:
            moved, members = self._moved(rows), group.members
            if self.optimizers is not None:
                update: Update = self.optimizers.of(members, moved, self.rates.alike(members))
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
        """Return views of what moves of `rows [g, T or more]`."""
        return (
            self.flat_module.pieces(rows)
            if self.shaped
            else [rows[:, columns] for columns in self.columns]
        )

    def _gradients(
        self, rows: Tensor, batch: Batch, context: Context
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss `[g]`, and a gradient for each of `_moved(rows)`."""
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
    """Scale each row of `[k, T]` down to a norm of at most `limit`."""
    norm = gradient.norm(dim=1, keepdim=True)
    scaled: Tensor = gradient * (limit / (norm + 1e-6)).clamp(max=1.0)
    return scaled


Update = Callable[[Sequence[Tensor], float | list[float], bool], None]
"""Moves weights of some clients: (a gradient for each tensor, a learning rate for all or each, True
for the first step).
"""


class SGD:
    """SGD over `weights`, with a `velocity` for each if there is momentum. Gradients may share
    memory and stay.
    """

    def __init__(self, settings: Training, weights: list[Tensor], velocity: list[Tensor]) -> None:
        self.weights, self.velocity = weights, velocity
        self.momentum, self.weight_decay = settings.momentum, settings.weight_decay
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


TOGETHER = 1 << 20
"""Most weights of several clients that one optimizer of torch moves on a CPU. It passes over them
several times in a step, which is slower than client by client if they do not fit the caches:
relative to clients one after another, ten models of 200,000 weights took 1.5 of the time with one
optimizer and 1.3 with one each, twenty models of 5,000 took 0.2 and 0.4.
"""


class TorchOptimizers:
    """Fresh optimizers of torch, one for each client, over what moves of all clients' rows,
    `tensors [k, ...]`.

    One optimizer serves all clients if that is allowed (`joint`) and faster, since these optimizers
    treat every number alike, until a batch is not everybody's or learning rates differ: from then
    on the clients' optimizer states differ.
    """

    def __init__(
        self, settings: Training, rate: float, tensors: Sequence[Tensor], joint: bool
    ) -> None:
        self.clients = len(tensors[0])
        joint = joint and self.clients > 1
        joint = joint and (
            tensors[0].is_cuda or sum(tensor.numel() for tensor in tensors) <= TOGETHER
        )
        self._joint = _Optimizer(settings, rate, tensors) if joint else None
        separate = range(0 if joint else self.clients)
        self._separate = [
            _Optimizer(settings, rate, [tensor[k] for tensor in tensors]) for k in separate
        ]

    def of(self, members: Sequence[int], tensors: Sequence[Tensor], alike: bool) -> Update:
        """Return the update of `tensors [g, ...]` of the clients `members`; `alike` if their rates
        are equal.
        """
        if self._joint is not None:
            if alike and list(members) == list(range(self.clients)):
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
    """An optimizer of torch and the tensors that it moves: `[k, ...]` of k clients, `[...]` of one."""

    def __init__(self, settings: Training, rate: float, tensors: Sequence[Tensor]) -> None:
        self.settings, self.rate = settings, rate
        self.tensors = [torch.nn.Parameter(tensor) for tensor in tensors]
        # above 0, since the rates of groups are in proportion to it
        self.current = self.first = rate or settings.learning_rate
        self.optimizer = settings.torch_optimizer(self.tensors, self.first)
        self.group_rates = [group["lr"] for group in self.optimizer.param_groups]

    def attach(self, tensors: Sequence[Tensor]) -> None:
        """Move these tensors from now on."""
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
        """Set the learning rate of each group of parameters in proportion to that of the step, like
        the schedulers of torch.
        """
        for group, first in zip(self.optimizer.param_groups, self.group_rates, strict=True):
            group["lr"] = first / self.first * rate
        self.current = rate

    def of_row(self, k: int) -> "_Optimizer":
        """Return an optimizer of row k alone, with its share of this one's state."""
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
    """Slice per-parameter optimizer state for row k; copy shared state."""
    if not isinstance(value, Tensor):
        return value
    return (value[k] if value.shape == shape else value).clone()
