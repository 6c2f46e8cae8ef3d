"""Pickling of messages between processes.

The memory of tensors and arrays is not pickled: each engine transports it in its own way.
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

from fedloom.algorithm.method import Method
from fedloom.algorithm.records import Plan
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task

Packed = tuple[bytes, list[Any]]
"""Result of `dump`: pickled bytes, and the memory of tensors and arrays."""

FROM_TASK = {
    "layout": "layout",
    "initial": "initial",
    "sizes": "sizes",
    "module": "model",
    "training": "training",
}
"""Fields of a `Plan` that are not sent. The receiver takes these attributes of its task instead."""


def dump(message: Any, common: Mapping[int, int] | None = None) -> Packed:
    """Pickle a message.

    Classes and functions of the main program are pickled by value, all others by name. A method is
    pickled without its server state, and its `Plan` without the fields in `FROM_TASK`. Pool files
    are replaced by their budget. Exceptions of pickling are raised unchanged.

    Args:
        message: The message.
        common: Indices of tensors that the receiver already has in its list, by their ids.

    Returns:
        The bytes, and the memory of each tensor and array once.
    """
    file = io.BytesIO()
    memory = list[Any]()
    _Pickler(file, common or {}, memory).dump(message)
    return file.getvalue(), memory


def load(
    data: bytes, memory: Sequence[Any], common: Sequence[Tensor] = (), task: Task | None = None
) -> Any:
    """Unpickle a message of `dump`.

    Args:
        data: Pickled bytes.
        memory: Memory of tensors and arrays.
        common: Tensors that `dump` has replaced by their indices.
        task: The receiver's task. It is required if the message contains a `Plan`.

    Returns:
        The message. Its tensors and arrays are views of `memory`.
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
            # Expanded dimensions stay expanded: on a copy, sums may round differently.
            if 0 in value.stride():
                stored = value[
                    tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())
                ]
            # NumPy has no bfloat16.
            bits = stored.view(torch.int16) if value.dtype == torch.bfloat16 else stored
            memory = pickle.PickleBuffer(np.ascontiguousarray(bits.numpy(force=True)).data)
            return _tensor, (memory, value.dtype, tuple(stored.shape), tuple(value.shape))
        if isinstance(value, PoolFiles):  # only the owner uses the files
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
        self._common = common
        self._task = task

    def persistent_load(self, name: Any) -> Any:
        kind, *values = name
        if kind == "common":
            return self._common[values[0]]
        assert self._task is not None, "a method with a plan must follow its task"
        provided = {name: getattr(self._task, source) for name, source in FROM_TASK.items()}
        return Plan(**provided, **values[0])
