"""Small modules with every feature of modules.

They are at the top level of this file so that worker processes can import them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

FEATURES, CLASSES = 5, 4


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def halved(_: nn.Module, __: object, output: Tensor) -> Tensor:
    return 0.5 * output


def shifted(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0] + 1


def damped(_: nn.Module, gradients: tuple[Tensor | None], __: object) -> tuple[Tensor | None]:
    return tuple(None if gradient is None else 0.3 * gradient for gradient in gradients)


class AddedWeights(nn.Module):
    """Two parameters with one tensor as their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(FEATURES, FEATURES)) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.one + self.two)


class Counting(nn.Module):
    """Counts its calls and a moving mean in buffers, and has a parameter without effect on the
    loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
            self.seen.mul_(0.9).add_(0.1 * inputs.detach().mean(0))
        return inputs + self.seen


def linear() -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES)


def with_hook() -> nn.Module:
    layer = linear()
    layer.register_forward_hook(halved)
    return layer


def with_pre_hook() -> nn.Module:
    layer = linear()
    layer.register_forward_pre_hook(shifted)
    return layer


def with_backward_hook() -> nn.Module:
    layer = linear()
    layer.register_full_backward_hook(damped)
    return layer


def parametrized() -> nn.Module:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def tied() -> nn.Module:
    lower, upper = linear(), linear()
    upper.weight = lower.weight
    return nn.Sequential(lower, nn.ReLU(), upper)


def frozen() -> nn.Module:
    layer = linear()
    layer.bias.requires_grad_(False)
    return layer


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "relu": nn.ReLU,
    "hook": with_hook,
    "pre-hook": with_pre_hook,
    "backward hook": with_backward_hook,
    "parametrization": parametrized,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "spectral norm": lambda: nn.utils.spectral_norm(linear()),
    "tied": tied,
    "added weights": AddedWeights,
    "counting": Counting,
    "frozen": frozen,
    "batch norm": lambda: nn.BatchNorm1d(FEATURES),
    "dropout": lambda: nn.Dropout(0.4),
    "layer norm": lambda: nn.LayerNorm(FEATURES),
}


def build_module(
    names: tuple[str, ...], dtype: torch.dtype = torch.float64, repeated: bool = False
) -> nn.Module:
    """Chain these layers and a classifier; `repeated` applies each twice in a row."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layers = [PARTS[name]() for name in names]
        passed = [layer for layer in layers for _ in range(1 + repeated)]
        return nn.Sequential(nn.Flatten(), *passed, nn.Linear(FEATURES, CLASSES)).to(dtype)
