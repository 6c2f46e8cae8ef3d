"""What travels through Ray's object store: a few bytes of words, and the numbers as plain arrays.

Ray lays arrays in memory that every process of a node reads without a copy; torch tensors it would copy. This module imports
Ray: only what works with it imports this module.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ray.cloudpickle import CloudPickler
from torch import Tensor

from fedloom.algorithm import Plan
from fedloom.engines.processes.channel import SetsTensorsAside
from fedloom.engines.processes.shared import unexpanded

Parcel = tuple[bytes, bytes, list[npt.NDArray[Any]]]
"""The words, what each array is (type and shape of its tensor), and the arrays; nothing that needs torch to be read."""

Resolve = Callable[[list[Any]], Plan]
"""Makes the plan of a method from its numbers."""


def pack(message: Any) -> Parcel:
    """Make a message ready. Classes and functions of the main program travel whole, all others by their names.

    A method goes without its server's state and with no more of its plan than numbers. Raises whatever pickling raises.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(message)  # type: ignore[no-untyped-call]
    kinds = pickle.dumps([(tensor.dtype, tuple(tensor.shape)) for tensor in pickler.tensors])
    return buffer.getvalue(), kinds, [_array(tensor) for tensor in pickler.tensors]


def unpack(parcel: Parcel, resolve: Resolve | None = None) -> Any:
    """The message. Its tensors lie where the arrays do: in the object store, they must not be written to."""
    words, kinds, arrays = parcel
    described = pickle.loads(kinds)
    tensors = [_tensor(array, *kind) for array, kind in zip(arrays, described, strict=True)]
    return _Unpickler(words, tensors, resolve).load()


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


class _Pickler(SetsTensorsAside, CloudPickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        self.begin()

    def shared(self, array: npt.NDArray[Any]) -> Tensor | None:
        if not (array.ndim and array.dtype.kind in "iuf" and array.dtype.isnative):
            return None
        try:
            return torch.from_numpy(np.ascontiguousarray(array))
        except TypeError:  # a type that torch lacks
            return None

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        return CloudPickler.reducer_override(self, value) if reduced is NotImplemented else reduced  # type: ignore[no-untyped-call]


class _Unpickler(pickle.Unpickler):
    """Puts tensors and arrays back in."""

    def __init__(self, words: bytes, tensors: list[Tensor], resolve: Resolve | None) -> None:
        super().__init__(io.BytesIO(words))
        self._tensors, self._resolve = tensors, resolve

    def persistent_load(self, name: Any) -> Any:
        kind, *values = name
        if kind == "plan":
            if self._resolve is None:
                raise pickle.UnpicklingError("a method's plan means nothing without a task")
            return self._resolve(values)
        tensor = self._tensors[values[0]]
        return tensor.numpy() if kind == "array" else tensor
