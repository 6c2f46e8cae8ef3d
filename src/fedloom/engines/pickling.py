"""Pickling of messages between processes, but for the memory of tensors and arrays: each engine
moves it in its own way.
"""

import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from fedloom.method import Method
from fedloom.records import Plan
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task

Packed = tuple[bytes, list[Any]]
"""A message as `dump` leaves it."""

FROM_TASK = {
    "layout": "layout",
    "initial": "initial",
    "sizes": "sizes",
    "module": "model",
    "training": "training",
}
"""Fields of a `Plan` that are not sent, and the attributes of the receiver's task that replace
them.
"""


def dump(message: Any, common: Mapping[int, int] | None = None) -> Packed:
    """Pickle a message. Return the bytes, and the memory of each of its tensors and arrays, each
    once.

    Classes and functions of the main program are pickled by value, all others by name. A method is
    sent without its server state, and its `Plan` without the fields that the receiver's task
    provides. Pool files are sent as their budget. `common` maps the ids of tensors that the
    receiver has to their indices in the receiver's list. Raises whatever pickling raises.
    """
    file, memory = io.BytesIO(), list[Any]()
    _Pickler(file, common or {}, memory).dump(message)
    return file.getvalue(), memory


def load(
    data: bytes, memory: Sequence[Any], common: Sequence[Tensor] = (), task: Task | None = None
) -> Any:
    """Undo `dump`. `common` are the tensors that it left out; the `task` is needed to restore a
    method's `Plan`.
    """
    return _Unpickler(data, memory, common, task).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, common: Mapping[int, int], memory: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=memory.append)
        self._common = common

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is Tensor and id(value) in self._common:
            return "common", self._common[id(value)]
        if isinstance(value, Plan):
            names = [field.name for field in fields(Plan) if field.name not in FROM_TASK]
            return "plan", {name: getattr(value, name) for name in names}
        return None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor:
            stored = value
            # without expanded dimensions, of whose copy sums might be rounded in another way
            if 0 in value.stride():
                stored = value[
                    tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())
                ]
            # NumPy lacks this type
            bits = stored.view(torch.int16) if value.dtype == torch.bfloat16 else stored
            memory = pickle.PickleBuffer(np.ascontiguousarray(bits.numpy(force=True)).data)
            return _tensor, (memory, value.dtype, tuple(stored.shape), tuple(value.shape))
        if isinstance(value, PoolFiles):  # the files stay with their owner
            return PoolFiles, (None, value.budget)
        if isinstance(value, Method):
            reduced: Any = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            make, arguments, attributes, *iterators = reduced
            if isinstance(attributes, dict):
                attributes = {
                    name: attribute for name, attribute in attributes.items() if name != "state"
                }
            return make, arguments, attributes, *iterators
        return super().reducer_override(value)


def _tensor(
    memory: Any, dtype: torch.dtype, stored: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    if not prod(stored):
        return torch.empty(shape, dtype=dtype)
    if not memoryview(memory).readonly:
        return torch.frombuffer(memory, dtype=dtype).view(stored).expand(shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=dtype).view(stored).expand(shape)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, memory: Sequence[Any], common: Sequence[Tensor], task: Task | None
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=memory)
        self._common, self._task = common, task

    def persistent_load(self, name: Any) -> Any:
        kind, *values = name
        if kind == "common":
            return self._common[values[0]]
        assert self._task is not None, "a method comes after the task that its plan is of"
        provided = {name: getattr(self._task, source) for name, source in FROM_TASK.items()}
        return Plan(**provided, **values[0])
