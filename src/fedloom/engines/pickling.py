"""Pickling of messages between processes. Tensors are taken out, since each engine moves them in its own way."""

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, cast

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Plan
from fedloom.task import Task

_NUMBERS = frozenset(np.dtype(code).str for code in "?bBhHiIlLqQefd")
"""Dtypes of arrays that PyTorch has too."""

_NOTHING: Mapping[int, int] = {}


def dump(message: Any, common: Mapping[int, int] = _NOTHING) -> tuple[bytes, list[Tensor]]:
    """Pickle a message. Return the bytes, and the list of its tensors (and arrays, as tensors), each once.

    Classes and functions of the main program are pickled by value, all others by name. A method is sent without its server
    state, and its `Plan` as the few numbers that define it. `common` maps the ids of tensors that the receiver has to their
    indices in the receiver's list. Raises whatever pickling raises.
    """
    buffer = io.BytesIO()
    pickler = _TensorPickler(buffer, common)
    pickler.dump(message)
    return buffer.getvalue(), pickler.tensors


def load(data: bytes, tensors: Sequence[Tensor], common: Sequence[Tensor] = (), task: Task | None = None) -> Any:
    """Undo `dump`. `common` are the tensors that it left out; the `task` is needed to restore a method's `Plan`."""
    return _TensorUnpickler(data, tensors, common, task).load()


def unexpanded(tensor: Tensor) -> Tensor:
    """Return the tensor with size 1 in expanded dimensions: sums over a contiguous copy of them may round differently."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


class _TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, buffer: io.BytesIO, common: Mapping[int, int]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._common = common
        self._indices: dict[int, int] = {}
        self._alive: list[Any] = []  # so that ids stay unique

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is Tensor:
            index = self._common.get(id(value))
            return ("tensor", self._index(value, value)) if index is None else ("common", index)
        if type(value) is np.ndarray and value.ndim and value.dtype.str in _NUMBERS:
            return "array", self._index(value, torch.from_numpy(np.require(value, requirements=["C", "W"])))
        if isinstance(value, Plan):
            return "plan", value.clients, value.participants, value.rounds, value.seed, value.classes
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Algorithm):
            make, arguments, attributes, *iterators = cast(
                tuple[Any, ...], value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            )
            if isinstance(attributes, dict):
                attributes = {name: attribute for name, attribute in attributes.items() if name != "state"}
            return make, arguments, attributes, *iterators
        return super().reducer_override(value)

    def _index(self, value: Any, tensor: Tensor) -> int:
        if id(value) not in self._indices:
            self._indices[id(value)] = len(self.tensors)
            self.tensors.append(tensor)
            self._alive.append(value)
        return self._indices[id(value)]


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Tensor], common: Sequence[Tensor], task: Task | None) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors, self._common, self._task = tensors, common, task

    def persistent_load(self, name: Any) -> Any:
        kind, *values = name
        if kind == "tensor":
            return self._tensors[values[0]]
        if kind == "array":
            return self._tensors[values[0]].numpy()
        if kind == "common":
            return self._common[values[0]]
        if self._task is None:
            raise pickle.UnpicklingError("a method's plan means nothing without a task")
        task, (clients, participants, rounds, seed, classes) = self._task, values
        sizes = (clients, participants, rounds, seed, classes)
        return Plan(task.layout, task.initial, *sizes, task.sizes, task.model, training=task.training)
