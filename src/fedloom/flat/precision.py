"""Mixed precision: products of matrices and convolutions in fewer digits, everything that needs them in all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_SHORT = frozenset({
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.scaled_dot_product_attention, torch.einsum, torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.baddbmm,
    Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm,
})  # fmt: skip
"""Functions that compute in the short type, as in torch's autocast."""

_LONG = frozenset({
    F.cross_entropy, F.nll_loss, F.kl_div, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits,
    F.log_softmax, F.softmax, torch.log_softmax, torch.softmax, Tensor.log_softmax, Tensor.softmax, torch.logsumexp,
    Tensor.logsumexp, F.layer_norm, F.group_norm, F.normalize, F.cosine_similarity, F.softplus, F.pairwise_distance,
    torch.exp, Tensor.exp, torch.log, Tensor.log, torch.norm, Tensor.norm, torch.pow, Tensor.pow, Tensor.__pow__,
    torch.sum, Tensor.sum, torch.prod, Tensor.prod, torch.cumsum, Tensor.cumsum,
})  # fmt: skip
"""Functions that compute in float32, likewise."""


def autocast(kind: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Compute one model's forward pass and loss in `kind` (None: in none); weights change, so none are cached."""
    return nullcontext() if kind is None else torch.autocast(device.type, kind, cache_enabled=False)


def stacked_autocast(kind: torch.dtype | None) -> AbstractContextManager[Any]:
    """Do the same for models under `vmap`, which torch's autocast does not see: vmap's rules run before it."""
    return nullcontext() if kind is None else _Autocast(kind)


class _Autocast(TorchFunctionMode):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = self.kind if func in _SHORT else torch.float32 if func in _LONG else None
        if kind is None:
            return func(*args, **(kwargs or {}))
        source = torch.float32 if func in _SHORT else self.kind
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(kind) if t.dtype == source else t, (args, kwargs or {}))
        return func(*args, **kwargs)
