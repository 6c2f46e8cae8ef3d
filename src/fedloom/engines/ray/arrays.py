"""Messages for Ray's object store, with tensors as NumPy arrays.

Every process of a node reads arrays in the object store without a copy; Ray would copy PyTorch tensors.
"""

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
"""The pickled message, the pickled dtype and shape of each tensor, and the arrays, to be read without PyTorch."""


def pack_arrays(message: Any, common: Mapping[int, int] | None = None) -> PackedArrays:
    """Pack a message, as `dump` does."""
    data, tensors = dump(message, common or {})
    kinds = pickle.dumps([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
    return data, kinds, [_array(tensor) for tensor in tensors]


def unpack_arrays(packed: PackedArrays) -> Packed:
    """Return the arguments for `load`. The tensors share the arrays' memory, which is read-only in the object store."""
    data, kinds, arrays = packed
    return data, [_tensor(array, *kind) for array, kind in zip(arrays, pickle.loads(kinds), strict=True)]


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the tensor's values as an array, unexpanded, and viewed as integers if NumPy lacks the dtype."""
    values = unexpanded(tensor.detach()).cpu().contiguous().resolve_conj().resolve_neg()
    if values.dtype == torch.bfloat16 or values.dtype.itemsize == 1:
        values = values.view(torch.int16 if values.dtype.itemsize == 2 else torch.uint8)
    return values.numpy()


def _tensor(array: npt.NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype).expand(shape)
