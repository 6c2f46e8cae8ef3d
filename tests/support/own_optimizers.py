"""Optimizers and learning-rate schedules of a user, in a module that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Sign(torch.optim.Optimizer):
    """Steps by the sign of a moving mean, elementwise."""

    def __init__(self, params: Iterable[Tensor], lr: float, smoothing: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "smoothing": smoothing})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["smoothing"])
                parameter.sub_(mean.tanh(), alpha=group["lr"])


class Normed(torch.optim.Optimizer):
    """Divides each gradient by its norm, and matrices also by their largest row.

    It needs whole tensors.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad / (parameter.grad.norm() + 1e-3)
                if parameter.dim() == 2:
                    gradient = gradient / (gradient.norm(dim=1).amax() + 1e-3)
                parameter.sub_(gradient, alpha=group["lr"])


class Grouped(torch.optim.SGD):
    """SGD with a ten times larger step for matrices than for vectors."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.0) -> None:
        tensors = list(params)
        groups = [
            {"params": [tensor for tensor in tensors if tensor.dim() > 1], "lr": 10 * lr},
            {"params": [tensor for tensor in tensors if tensor.dim() == 1]},
        ]
        super().__init__([group for group in groups if group["params"]], lr=lr, momentum=momentum)


def no_optimizer(params: Iterable[Tensor], lr: float) -> None:
    """Return None; an invalid function instead of an optimizer class."""


def falling(done: int, total: int) -> float:
    """Decrease linearly from 1."""
    return 1 - done / total


def never(done: int, total: int) -> float:
    """Return no rate after the first step."""
    return 1.0 - (done > 0)
