"""Dropout and mixed precision of clients under `vmap`, and mixed precision of one client."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from fedloom.common.device import moved

_SHARED_AXES = {F.dropout: None, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
"""Number of trailing axes of a sample that share one draw (None: each value has its own draw)."""


def client_dropout(streams: Sequence[torch.Generator]) -> AbstractContextManager[Any]:
    """Draw the dropout masks of row k under `vmap` from the k-th stream, inside the block.

    On the CPU and in contiguous memory format, a stream gives the same masks as torch's global
    generator with the same seed. On CUDA or with channels last, torch draws different masks from
    the same distribution. Without streams, `vmap` refuses layers that draw random numbers.
    """
    return _Dropout(streams) if streams else nullcontext()


class _Dropout(TorchFunctionMode):
    def __init__(self, streams: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.streams = streams

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func not in _SHARED_AXES:
            return func(*args, **options)
        return self._dropout(_SHARED_AXES[func], *args, **options)

    def _dropout(
        self,
        axes: int | None,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0 or input.numel() == 0:
            return input
        shape = input.shape if axes is None else (*input.shape[: input.dim() - axes], *[1] * axes)
        mask: Tensor = cast(Any, _Masks).apply(input.detach(), tuple(shape), p, self.streams)
        return input.mul_(mask) if inplace else input * mask


class _Masks(torch.autograd.Function):
    """Dropout masks: 0 with probability p, otherwise 1 / (1 - p).

    The rule for `vmap` creates the masks of all clients.
    """

    @staticmethod
    def forward(
        input: Tensor, shape: tuple[int, ...], p: float, streams: Sequence[torch.Generator]
    ) -> Tensor:
        return _mask(input, shape, p, streams[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any,
        axes: Any,
        input: Tensor,
        shape: tuple[int, ...],
        p: float,
        streams: Sequence[torch.Generator],
    ) -> tuple[Tensor, int]:
        return torch.stack([_mask(input, shape, p, stream) for stream in streams]), 0


def _mask(like: Tensor, shape: tuple[int, ...], p: float, stream: torch.Generator) -> Tensor:
    if p == 1:
        return like.new_zeros(shape)
    drawn = torch.empty(shape, dtype=like.dtype).bernoulli_(1 - p, generator=stream)
    return moved(drawn.div_(1 - p), like.device)


_SHORT = frozenset({
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d,
    F.conv_transpose3d, F.scaled_dot_product_attention, torch.einsum, torch.matmul, torch.mm,
    torch.bmm, torch.mv, torch.addmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__,
    Tensor.__rmatmul__, Tensor.mm, Tensor.bmm,
})  # fmt: skip
"""Functions that compute in the type of autocast, as in torch."""

_LONG = frozenset({
    F.cross_entropy, F.nll_loss, F.kl_div, F.mse_loss, F.l1_loss, F.smooth_l1_loss,
    F.binary_cross_entropy_with_logits, F.log_softmax, F.softmax, torch.log_softmax, torch.softmax,
    Tensor.log_softmax, Tensor.softmax, torch.logsumexp, Tensor.logsumexp, F.layer_norm,
    F.group_norm, F.normalize, F.cosine_similarity, F.softplus, F.pairwise_distance, torch.exp,
    Tensor.exp, torch.log, Tensor.log, torch.norm, Tensor.norm, torch.pow, Tensor.pow,
    Tensor.__pow__, torch.sum, Tensor.sum, torch.prod, Tensor.prod, torch.cumsum, Tensor.cumsum,
})  # fmt: skip
"""Functions that compute in float32, as in torch."""


def autocast(kind: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Compute one model's forward pass and loss in another type, inside the block.

    Cast weights are not cached, because the weights change in every step.

    Args:
        kind: Type of operations that allow it. None changes nothing.
        device: Device of the model.

    Returns:
        A context manager.
    """
    return nullcontext() if kind is None else torch.autocast(device.type, kind, cache_enabled=False)


def stacked_autocast(kind: torch.dtype | None) -> AbstractContextManager[Any]:
    """Do the same for models under `vmap`, on which torch's autocast has no effect."""
    return nullcontext() if kind is None else _Autocast(kind)


class _Autocast(TorchFunctionMode):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _SHORT:
            source = torch.float32
            kind = self.kind
        elif func in _LONG:
            source = self.kind
            kind = torch.float32
        else:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(
            Tensor, lambda t: t.to(kind) if t.dtype == source else t, (args, kwargs or {})
        )
        return func(*args, **kwargs)
