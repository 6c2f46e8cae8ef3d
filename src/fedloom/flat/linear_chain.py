"""Chains of linear layers, trained without autograd.

Their gradients are matrix products, which include the update of SGD.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedloom.common.rates import CONSTANT
from fedloom.common.training import Training
from fedloom.flat.layout import Layout, TensorSlice
from fedloom.flat.module import Batch, piece
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


def views(layers: Sequence[LinearLayer], rows: Tensor) -> dict[str, Tensor]:
    """Return views of the weights and biases of k models by name.

    Args:
        layers: The chain.
        rows: The models, `[k, P]`.

    Returns:
        Weights `[k, out, in]` and biases `[k, 1, out]`.
    """
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        tensors[layer.weight.name] = piece(rows, layer.weight)
        if layer.bias is not None:
            tensors[layer.bias.name] = piece(rows, layer.bias).unsqueeze(1)
    return tensors


@torch.no_grad()
def backward(
    layers: Sequence[LinearLayer],
    weights: Mapping[str, Tensor],
    batch: Batch,
    use: Callable[[TensorSlice, Tensor, Tensor | None], None],
    lowest: int = 0,
) -> Tensor:
    """Compute the mean cross entropy of k models and its gradients, from the last layer down.

    Args:
        layers: The chain.
        weights: Weights and biases of the models by name, as `views` returns them.
        batch: Samples, `[k, b, ...]`, with their `share` of the mean.
        use: Called as `use(entry, d, x)` for each weight and bias. The gradient of a weight
            `[k, out, in]` is d'x, with the input x `[k, b, in]` of the layer and the gradient d
            `[k, b, out]` of its output. For a bias, x is None and the gradient is the sum of d over
            the samples. The function may change the weight or bias.
        lowest: Number of the lowest layer that needs a gradient.

    Returns:
        The loss of each model, `[k]`.
    """
    values = _forward(layers, weights, batch.inputs)
    log_probabilities = values[-1].log_softmax(2)
    labels = batch.labels.unsqueeze(2)
    share = 1 / labels.shape[1] if batch.share is None else batch.share.unsqueeze(2).to(values[-1])
    picked = log_probabilities.gather(2, labels)
    loss = -(picked * share).sum((1, 2))
    ones = torch.ones_like(picked)
    delta = log_probabilities.exp_().scatter_add_(2, labels, -ones).mul_(share)
    for index in reversed(range(lowest, len(layers))):
        layer = layers[index]
        if layer.rectified:
            delta = torch.ops.aten.threshold_backward(delta, values[index + 1], 0)
        below = torch.bmm(delta, weights[layer.weight.name]) if index > lowest else delta
        use(layer.weight, delta, values[index])
        if layer.bias is not None:
            use(layer.bias, delta, None)
        delta = below
    return loss


def _forward(
    layers: Sequence[LinearLayer], weights: Mapping[str, Tensor], inputs: Tensor
) -> list[Tensor]:
    """Return the input of each layer, `[k, b, in]`, and the logits."""
    values = [inputs.reshape(*inputs.shape[:2], -1)]
    for layer in layers:
        factors = values[-1], weights[layer.weight.name].mT
        bias = None if layer.bias is None else weights[layer.bias.name]
        out = torch.bmm(*factors) if bias is None else torch.baddbmm(bias, *factors)
        values.append(out.relu_() if layer.rectified else out)
    return values


def add_gradient(
    target: Tensor, delta: Tensor, x: Tensor | None, *, beta: float, alpha: float = 1.0
) -> None:
    """Set target <- beta target + alpha gradient.

    Args:
        target: Weight `[k, out, in]` or bias `[k, 1, out]`. With beta = 0 its values are not read.
        delta: Gradient of the layer's output, `[k, b, out]`.
        x: Input of the layer, `[k, b, in]`, or None for a bias.
        beta: Factor of the present values.
        alpha: Factor of the gradient.
    """
    if x is not None:
        target.baddbmm_(delta.mT, x, beta=beta, alpha=alpha)
        return
    if beta == 0:
        target.zero_()
    elif beta != 1:
        target.mul_(beta)
    target.add_(delta.sum(1, keepdim=True), alpha=alpha)


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

    def __call__(self, rows: Tensor, velocity: Tensor | None) -> Callable[[Batch], Tensor]:
        """Return the function that trains some models on a batch.

        Args:
            rows: The models, `[k, P]`. The function changes them in place.
            velocity: Velocity, `[k, T]`, which it changes too, or None without momentum.

        Returns:
            (batch with samples `[k, b, ...]`) -> loss before the step, `[k]`.
        """
        weights = views(self.layers, rows)
        momenta = None if velocity is None else views(self.layers, velocity)

        def step(batch: Batch) -> Tensor:
            move = partial(self._move, weights, momenta, batch.step == 0)
            return backward(self.layers, weights, batch, move)

        return step

    def _move(
        self,
        weights: Mapping[str, Tensor],
        momenta: Mapping[str, Tensor] | None,
        starts: bool,
        entry: TensorSlice,
        delta: Tensor,
        x: Tensor | None,
    ) -> None:
        """Set W <- W - eta (gradient + decay W), with the velocity if there is momentum."""
        weight = weights[entry.name]
        if momenta is None:
            beta = 1 - self.rate * self.decay
            add_gradient(weight, delta, x, beta=beta, alpha=-self.rate)
            return
        momentum = momenta[entry.name]
        add_gradient(momentum, delta, x, beta=0 if starts else self.momentum)
        if self.decay:
            momentum.add_(weight, alpha=self.decay)
        weight.add_(momentum, alpha=-self.rate)


def _flattens(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)
    named = node.op == "call_method" and node.target == "flatten"
    return (named or node.target is torch.flatten) and node.args[1:] == (1,) and not node.kwargs
