"""What travels through Ray's object store: a few bytes of words, and the numbers as plain arrays.

Ray lays arrays in memory that every process of a node reads without a copy; torch tensors it would copy.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.engines.client_work import Packed
from fedloom.engines.pickling import dump, unexpanded

PackedArrays = tuple[bytes, bytes, list[npt.NDArray[Any]]]
"""The words, what each array is (type and shape of its tensor), and the arrays; nothing that needs torch to be read."""


def pack_arrays(message: Any, known: Mapping[int, int] | None = None) -> PackedArrays:
    """Make a message ready, as `dump` does."""
    data, tensors = dump(message, known or {})
    kinds = pickle.dumps([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
    return data, kinds, [_array(tensor) for tensor in tensors]


def unpack_arrays(packed: PackedArrays) -> Packed:
    """The message for `load`. Its tensors lie where the arrays do: in the object store, they must not be written to."""
    data, kinds, arrays = packed
    return data, [_tensor(array, *kind) for array, kind in zip(arrays, pickle.loads(kinds), strict=True)]


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """The numbers that make up a tensor: once where its axes repeat them, and as bytes where NumPy has no such type."""
    once = unexpanded(tensor.detach()).cpu().contiguous().resolve_conj().resolve_neg()
    if once.dtype == torch.bfloat16 or once.dtype.itemsize == 1:
        once = once.view(torch.int16 if once.dtype.itemsize == 2 else torch.uint8)
    return once.numpy()


def _tensor(array: npt.NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype).expand(shape)
