"""Multinomial logistic regression and multilayer perceptrons."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.common.fields import Count
from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.shapes import flat_features


class Perceptron(nn.Module):
    """`[n, ...] -> [n, classes]`: the flattened sample, ReLU layers of the widths `hidden`, then
    `head`.
    """

    def __init__(self, features: int, hidden: Sequence[int], classes: int) -> None:
        super().__init__()
        sizes = [features, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        logits: Tensor = self.head(x)
        return logits


@models.register("logistic")
def logistic(spec: DataSpec, *, zero_init: bool = False) -> nn.Module:
    """Multinomial logistic regression on the flattened sample.

    Args:
        zero_init: Start from zero weights, as FedDC's synthetic experiments do.

    Returns:
        A module from `[b, ...]` to logits `[b, Y]`.
    """
    module = Perceptron(flat_features("logistic", spec), (), spec.outputs)
    if zero_init:
        nn.init.zeros_(module.head.weight)
        nn.init.zeros_(module.head.bias)
    return module


@models.register("mlp")
def mlp(spec: DataSpec, *, hidden: Sequence[Count] = (200, 200)) -> nn.Module:
    """Multilayer perceptron with ReLU layers of the widths `hidden`.

    Args:
        hidden: Widths of the hidden layers, from bottom to top.

    Returns:
        A module from `[b, ...]` to logits `[b, Y]`.
    """
    return Perceptron(flat_features("mlp", spec), hidden, spec.outputs)


@models.register("mcmahan_2nn")
def mcmahan_2nn(spec: DataSpec) -> nn.Module:
    """McMahan's 2NN: two hidden layers of 200 (199,210 parameters on 28x28 images and 10 classes).

    Source: McMahan et al. 2017, section 3.
    """
    return Perceptron(flat_features("mcmahan_2nn", spec), (200, 200), spec.outputs)


@models.register("feddc_fcn")
def feddc_fcn(spec: DataSpec, *, hidden: Count = 200) -> nn.Module:
    """FedDC's fully connected network: two hidden layers of equal width (200 for MNIST, 100 for
    EMNIST letters).

    Args:
        hidden: Width of both hidden layers.

    Returns:
        A module from `[b, ...]` to logits `[b, Y]`.

    Source: FedUmf, appendix, with the widths of FedDC's code.
    """
    return Perceptron(flat_features("feddc_fcn", spec), (hidden, hidden), spec.outputs)
