"""Linear layers one after another, trained without autograd: their gradients are products, into which SGD's update is folded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedloom.config.rates import CONSTANT
from fedloom.flat.layout import Layout, TensorSlice
from fedloom.flat.module import Batch
from fedloom.training import Training


@dataclass(frozen=True)
class LinearLayer:
    """Where a layer's weight `[out, in]` and bias `[out]` lie in a row, and whether a ReLU follows."""

    weight: TensorSlice
    bias: TensorSlice | None
    rectified: bool


def linear_layers(module: nn.Module, layout: Layout) -> list[LinearLayer]:
    """The layers of a module that flattens its sample and passes it through linear layers, each with or without a ReLU; none for
    any other module, such as one with hooks, parametrizations, frozen weights or weights that layers share."""
    if layout.frozen or any(_has_hooks(part) for part in module.modules()):
        return []
    try:
        nodes = list(fx.symbolic_trace(module).graph.nodes)
    except Exception:  # what cannot be traced is something else, for whichever reason
        return []
    slices = {part.name: part for part in layout.slices}
    layers: list[LinearLayer] = []
    for before, node in pairwise(nodes[:-1]):
        if node.args[:1] != (before,) or len(before.users) != 1:
            return []
        kind = type(module.get_submodule(str(node.target))) if node.op == "call_module" else None
        if kind is nn.Identity or (_flattens(module, node) and not layers):
            continue
        if layers and (kind is nn.ReLU or _rectifies(node)):
            layers[-1] = replace(layers[-1], rectified=True)
        elif kind is nn.Linear and f"{node.target}.weight" in slices:
            layers.append(LinearLayer(slices[f"{node.target}.weight"], slices.get(f"{node.target}.bias"), False))
        else:
            return []
    used = [part.name for layer in layers for part in (layer.weight, layer.bias) if part is not None]
    alone = sorted(used) == sorted(slices) and layout.trainable == layout.size and not layout.integers
    return layers if alone else []


@torch.no_grad()
def backward(
    layers: Sequence[LinearLayer], rows: Tensor, batch: Batch, use: Callable[[TensorSlice, Tensor, Tensor], None]
) -> Tensor:
    """The mean cross entropy `[k]` of k models `rows [k, P]`, and its gradient by the chain rule, from the last layer down.

    `use(part, d, x)` is called for each weight and bias W `[k, out, in]` (a bias is one column), whose gradient is d'x: x
    `[k, b, in]` is what enters, d `[k, b, out]` the loss's gradient by what leaves. It may move W. It heeds the samples' `share`
    of the mean.
    """
    ones = torch.ones_like(batch.labels, dtype=rows.dtype).unsqueeze(2)
    values = _forward(layers, rows, batch.inputs)
    log_probabilities = values[-1].log_softmax(2)
    labels = batch.labels.unsqueeze(2)
    share = 1 / labels.shape[1] if batch.share is None else batch.share.unsqueeze(2).to(rows)
    loss = -(log_probabilities.gather(2, labels) * share).sum((1, 2))
    delta = log_probabilities.exp_().scatter_add_(2, labels, -ones).mul_(share)
    for place in reversed(range(len(layers))):
        layer, inputs = layers[place], values[place]
        if layer.rectified:
            delta = torch.ops.aten.threshold_backward(delta, values[place + 1], 0)
        below = torch.bmm(delta, matrix(rows, layer.weight)) if place else delta
        use(layer.weight, delta, inputs)
        if layer.bias is not None:
            use(layer.bias, delta, ones)
        delta = below
    return loss


def _forward(layers: Sequence[LinearLayer], rows: Tensor, inputs: Tensor) -> list[Tensor]:
    """What enters each layer, `[k, b, in]`, and the logits."""
    values = [inputs.reshape(*inputs.shape[:2], -1)]
    for layer in layers:
        weight = matrix(rows, layer.weight).mT
        if layer.bias is None:
            out = torch.bmm(values[-1], weight)
        else:
            out = torch.baddbmm(matrix(rows, layer.bias).mT, values[-1], weight)
        values.append(out.relu_() if layer.rectified else out)
    return values


def matrix(rows: Tensor, part: TensorSlice) -> Tensor:
    """A view of every row's weight, `[k, out, in]`, or bias as one column, `[k, out, 1]`."""
    return rows[:, part.slice].view(len(rows), part.shape[0], -1)


class FoldedSGD:
    """A step of SGD on the mean cross entropy of k models of `linear_layers`, with momentum and weight decay.

    W <- W - eta d'x is one batched product that never writes the gradient itself down. Measured on the MLP 784-200-200-10 with 10
    models: 0.3 of the eager steps' time.
    """

    def __init__(self, layers: Sequence[LinearLayer], settings: Training, rate: float) -> None:
        self.layers, self.rate = layers, rate
        self.momentum, self.decay = settings.momentum, settings.weight_decay

    @staticmethod
    def covers(settings: Training) -> bool:
        """Whether local training with these settings is such a step: SGD without clipping, autocast or other options."""
        plain = settings.clip is None and settings.autocast == "none" and settings.local_schedule == CONSTANT
        return settings.optimizer == "sgd" and plain and not any(settings.optimizer_options.values())

    def __call__(self, rows: Tensor, velocity: Tensor | None, batch: Batch) -> Tensor:
        """Move `rows [k, P]` and, with momentum, `velocity [k, P]`; the answer is the loss before, `[k]`."""
        return backward(self.layers, rows, batch, partial(self._move, rows, velocity, batch.step == 0))

    def _move(
        self, rows: Tensor, velocity: Tensor | None, first: bool, part: TensorSlice, delta: Tensor, x: Tensor
    ) -> None:
        """W <- W - eta (delta' x + decay W), or the same through the velocity."""
        weight = matrix(rows, part)
        if velocity is None:
            weight.baddbmm_(delta.mT, x, beta=1 - self.rate * self.decay, alpha=-self.rate)
            return
        moved = matrix(velocity, part)
        moved.baddbmm_(delta.mT, x, beta=0 if first else self.momentum)
        if self.decay:
            moved.add_(weight, alpha=self.decay)
        weight.add_(moved, alpha=-self.rate)


def _has_hooks(module: nn.Module) -> bool:
    return any(
        getattr(module, name)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def _flattens(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        found = module.get_submodule(str(node.target))
        return isinstance(found, nn.Flatten) and (found.start_dim, found.end_dim) == (1, -1)
    named = node.op == "call_method" and node.target == "flatten"
    return (named or node.target is torch.flatten) and node.args[1:] == (1,) and not node.kwargs


def _rectifies(node: fx.Node) -> bool:
    return node.target in (torch.relu, F.relu) or (node.op == "call_method" and node.target == "relu")
