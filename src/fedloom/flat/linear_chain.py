"""Linear layers one after another, trained without autograd: the update is folded into the product that gives the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedloom.flat.layout import Layout, TensorSlice
from fedloom.flat.module import Batch, FoldedStep
from fedloom.training import Training


@dataclass(frozen=True)
class LinearLayer:
    """Where a layer's weight `[out, in]` and bias `[out]` lie in a row, and whether a ReLU follows."""

    weight: TensorSlice
    bias: TensorSlice | None
    rectified: bool


class LinearChain:
    """A model that flattens its sample and passes it through linear layers, each with or without a ReLU.

    With W `[k, out, in]` of k models, inputs x, and slopes d of the loss, W <- W - eta d'x is one batched product that never
    writes the gradient itself down. Measured on the MLP 784-200-200-10 with 10 models: 0.3 of the eager steps' time.
    """

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        self.layers = layers

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> LinearChain | None:
        """The chain that this module is, or None where it is anything else."""
        try:
            nodes = list(fx.symbolic_trace(module).graph.nodes)
        except Exception:  # whatever cannot be traced is no chain, for whichever reason
            return None
        slices = {part.name: part for part in layout.slices}
        layers: list[LinearLayer] = []
        for before, node in pairwise(nodes[:-1]):
            if node.args[:1] != (before,) or len(before.users) != 1:
                return None
            if _kind(module, node) is nn.Identity or (_flattens(module, node) and not layers):
                continue
            if _rectifies(module, node) and layers:
                layers[-1] = replace(layers[-1], rectified=True)
            elif _kind(module, node) is nn.Linear:
                layers.append(LinearLayer(slices[f"{node.target}.weight"], slices.get(f"{node.target}.bias"), False))
            else:
                return None
        used = [part.name for layer in layers for part in (layer.weight, layer.bias) if part is not None]
        alone = sorted(used) == sorted(slices) and layout.trainable == layout.size and not layout.integers
        return cls(layers) if layers and alone else None

    def folded(self, settings: Training, rate: float) -> FoldedStep | None:
        """A step of SGD on the mean cross entropy, with momentum and weight decay; None for what else the settings ask for.
        It heeds the samples' `share` of the mean."""
        if settings.optimizer != "sgd" or settings.clip is not None or any(settings.optimizer_options.values()):
            return None
        if settings.autocast != "none":
            return None
        momentum, decay = settings.momentum, settings.weight_decay

        def move(rows: Tensor, velocity: Tensor | None, part: TensorSlice, out: Tensor, x: Tensor, first: bool) -> None:
            """W <- W - eta (out' x + decay W), or the same through the velocity."""
            weight = _matrix(rows, part)
            if velocity is None:
                weight.baddbmm_(out.mT, x, beta=1 - rate * decay, alpha=-rate)
                return
            moved = _matrix(velocity, part)
            moved.baddbmm_(out.mT, x, beta=0 if first else momentum)
            if decay:
                moved.add_(weight, alpha=decay)
            weight.add_(moved, alpha=-rate)

        @torch.no_grad()
        def step(rows: Tensor, velocity: Tensor | None, batch: Batch) -> Tensor:
            ones = torch.ones_like(batch.labels, dtype=rows.dtype).unsqueeze(2)
            values = self._forward(rows, batch.inputs)
            chances = values[-1].log_softmax(2)
            picked = batch.labels.unsqueeze(2)
            part = 1 / picked.shape[1] if batch.share is None else batch.share.unsqueeze(2).to(rows)
            loss = -(chances.gather(2, picked) * part).sum((1, 2))
            delta = chances.exp_().scatter_add_(2, picked, -ones).mul_(part)
            first = batch.step == 0
            for place in reversed(range(len(self.layers))):
                layer, x = self.layers[place], values[place]
                if layer.rectified:
                    delta = torch.ops.aten.threshold_backward(delta, values[place + 1], 0)
                below = torch.bmm(delta, _matrix(rows, layer.weight)) if place else delta
                move(rows, velocity, layer.weight, delta, x, first)
                if layer.bias is not None:
                    move(rows, velocity, layer.bias, delta, ones, first)
                delta = below
            return loss

        return step

    def _forward(self, rows: Tensor, inputs: Tensor) -> list[Tensor]:
        """What enters each layer, `[k, b, in]`, and the logits."""
        values = [inputs.reshape(*inputs.shape[:2], -1)]
        for layer in self.layers:
            weight = _matrix(rows, layer.weight).mT
            if layer.bias is None:
                out = torch.bmm(values[-1], weight)
            else:
                out = torch.baddbmm(_matrix(rows, layer.bias).mT, values[-1], weight)
            values.append(out.relu_() if layer.rectified else out)
        return values


def _matrix(rows: Tensor, part: TensorSlice) -> Tensor:
    """A view of every row's weight, `[k, out, in]`, or bias as one column, `[k, out, 1]`."""
    return rows[:, part.slice].view(len(rows), part.shape[0], -1)


def _kind(module: nn.Module, node: fx.Node) -> type[nn.Module] | None:
    """The class of the submodule that a node calls, if it calls one."""
    return type(module.get_submodule(str(node.target))) if node.op == "call_module" else None


def _flattens(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        found = module.get_submodule(str(node.target))
        return isinstance(found, nn.Flatten) and (found.start_dim, found.end_dim) == (1, -1)
    named = node.op == "call_method" and node.target == "flatten"
    return (named or node.target is torch.flatten) and node.args[1:] == (1,) and not node.kwargs


def _rectifies(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return _kind(module, node) is nn.ReLU
    return node.target in (torch.relu, F.relu) or (node.op == "call_method" and node.target == "relu")
