"""Chains of linear layers, trained without autograd.

Their gradients are matrix products, which include the update of SGD.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedloom.common.rates import CONSTANT
from fedloom.common.training import Training
from fedloom.flat.layout import Layout, TensorSlice
from fedloom.flat.module import Batch
from fedloom.models.structure import copied

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class LinearLayer:
    """Position of a linear layer in a row.

    Attributes:
        weight: Slice of the weight, `[out, in]`.
        bias: Slice of the bias, `[out]`, or None.
        rectified: True if a ReLU follows.
    """

    weight: TensorSlice
    bias: TensorSlice | None
    rectified: bool

    @cached_property
    def names(self) -> list[str]:
        """Names of the weight and the bias."""
        return [entry.name for entry in (self.weight, self.bias) if entry is not None]


def linear_layers(module: nn.Module, layout: Layout) -> list[LinearLayer]:
    """Return the layers of a chain of linear layers, with or without ReLU.

    Args:
        module: The model.
        layout: Its layout.

    Returns:
        The layers in order. The list is empty for other modules.
    """
    if layout.frozen or any(
        getattr(submodule, name) for submodule in module.modules() for name in _HOOKS
    ):
        return []
    try:
        # Trace a copy with the same weights: a forward pass may assign attributes.
        traced = copied(module, {id(parameter): parameter for parameter in module.parameters()})
        nodes = list(fx.symbolic_trace(traced).graph.nodes)
    except Exception:  # modules that cannot be traced are no chains
        return []
    slices = {entry.name: entry for entry in layout.slices}
    layers: list[LinearLayer] = []
    for source, node in pairwise(nodes[:-1]):
        if node.args[:1] != (source,) or len(source.users) != 1:
            return []
        kind = type(module.get_submodule(str(node.target))) if node.op == "call_module" else None
        if kind is nn.Identity or (_flattens(module, node) and not layers):
            continue
        rectifies = node.target in (torch.relu, F.relu) or (node.op, node.target) == (
            "call_method",
            "relu",
        )
        if layers and (kind is nn.ReLU or rectifies):
            layers[-1] = replace(layers[-1], rectified=True)
        elif kind is nn.Linear and f"{node.target}.weight" in slices:
            layers.append(
                LinearLayer(
                    slices[f"{node.target}.weight"], slices.get(f"{node.target}.bias"), False
                )
            )
        else:
            return []
    used = [name for layer in layers for name in layer.names]
    complete = (
        sorted(used) == sorted(slices) and layout.trainable == layout.size and not layout.integers
    )
    return layers if complete else []


@torch.no_grad()
def backward(
    layers: Sequence[LinearLayer],
    rows: Tensor,
    batch: Batch,
    use: Callable[[TensorSlice, Tensor, Tensor], None],
    lowest: int = 0,
) -> Tensor:
    """Compute the mean cross entropy of k models and its gradients, from the last layer down.

    Args:
        layers: The chain.
        rows: The models, `[k, P]`.
        batch: Samples, `[k, b, ...]`, with their `share` of the mean.
        use: Called as `use(entry, d, x)` for each weight and bias W `[k, out, in]` (a bias has one
            column). The gradient of W is d'x, with the input x `[k, b, in]` of the layer and the
            gradient d `[k, b, out]` of its output. The function may change W.
        lowest: Number of the lowest layer that needs a gradient.

    Returns:
        The loss of each model, `[k]`.
    """
    bias_input = torch.ones_like(batch.labels, dtype=rows.dtype).unsqueeze(2)
    values = _forward(layers, rows, batch.inputs)
    log_probabilities = values[-1].log_softmax(2)
    labels = batch.labels.unsqueeze(2)
    share = 1 / labels.shape[1] if batch.share is None else batch.share.unsqueeze(2).to(rows)
    loss = -(log_probabilities.gather(2, labels) * share).sum((1, 2))
    delta = log_probabilities.exp_().scatter_add_(2, labels, -bias_input).mul_(share)
    for index in reversed(range(lowest, len(layers))):
        layer = layers[index]
        inputs = values[index]
        if layer.rectified:
            delta = torch.ops.aten.threshold_backward(delta, values[index + 1], 0)
        below = torch.bmm(delta, matrix(rows, layer.weight)) if index > lowest else delta
        use(layer.weight, delta, inputs)
        if layer.bias is not None:
            use(layer.bias, delta, bias_input)
        delta = below
    return loss


def _forward(layers: Sequence[LinearLayer], rows: Tensor, inputs: Tensor) -> list[Tensor]:
    """Return the input of each layer, `[k, b, in]`, and the logits."""
    values = [inputs.reshape(*inputs.shape[:2], -1)]
    for layer in layers:
        weight = matrix(rows, layer.weight).mT
        if layer.bias is None:
            out = torch.bmm(values[-1], weight)
        else:
            out = torch.baddbmm(matrix(rows, layer.bias).mT, values[-1], weight)
        values.append(out.relu_() if layer.rectified else out)
    return values


def matrix(rows: Tensor, entry: TensorSlice) -> Tensor:
    """Return a view of one tensor in all rows.

    Args:
        rows: The models, `[k, P]`.
        entry: Position of a weight or a bias.

    Returns:
        `[k, out, in]` for a weight, `[k, out, 1]` for a bias.
    """
    return rows[:, entry.slice].view(len(rows), entry.shape[0], -1)


class FoldedSGD:
    """A step of SGD on the mean cross entropy of k chains of linear layers.

    W <- W - eta d'x is one batched product, without a separate gradient in memory. With 10 models
    784-200-200-10 it takes 0.3 of the time of eager steps. Momentum and weight decay are supported.

    Args:
        layers: The chain.
        settings: Settings of local training.
        rate: Learning rate.
    """

    def __init__(self, layers: Sequence[LinearLayer], settings: Training, rate: float) -> None:
        self.layers = layers
        self.rate = rate
        self.momentum = settings.momentum
        self.decay = settings.weight_decay

    @staticmethod
    def covers(settings: Training) -> bool:
        """Return True for plain SGD, without clipping, autocast, schedule or other options."""
        plain = (
            settings.clip is None
            and settings.autocast == "none"
            and settings.local_schedule == CONSTANT
        )
        return (
            settings.optimizer == "sgd" and plain and not any(settings.optimizer_options.values())
        )

    def __call__(self, rows: Tensor, velocity: Tensor | None, batch: Batch) -> Tensor:
        """Update the models.

        Args:
            rows: The models, `[k, P]`. Changed in place.
            velocity: Velocity, `[k, T]`, or None without momentum. Changed in place.
            batch: Samples, `[k, b, ...]`.

        Returns:
            The loss before the step, `[k]`.
        """
        return backward(
            self.layers, rows, batch, partial(self._move, rows, velocity, batch.step == 0)
        )

    def _move(
        self,
        rows: Tensor,
        velocity: Tensor | None,
        starts: bool,
        entry: TensorSlice,
        delta: Tensor,
        x: Tensor,
    ) -> None:
        """Set W <- W - eta (delta' x + decay W), with the velocity if there is momentum."""
        weight = matrix(rows, entry)
        if velocity is None:
            weight.baddbmm_(delta.mT, x, beta=1 - self.rate * self.decay, alpha=-self.rate)
            return
        momentum = matrix(velocity, entry)
        momentum.baddbmm_(delta.mT, x, beta=0 if starts else self.momentum)
        if self.decay:
            momentum.add_(weight, alpha=self.decay)
        weight.add_(momentum, alpha=-self.rate)


def _flattens(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)
    named = node.op == "call_method" and node.target == "flatten"
    return (named or node.target is torch.flatten) and node.args[1:] == (1,) and not node.kwargs
