"""A pipe between two processes. Tensors stay in shared memory; the pipe carries their positions."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.engines.client_work import Packed
from fedloom.engines.pickling import dump, unexpanded
from fedloom.engines.processes.shared_memory import SharedMemory

INLINE = 4096
"""Tensors of at most this many bytes, unless in shared memory already, are sent inside the message."""

_Description = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int | bytes]
"""Dtype, shape in memory, shape when expanded, region and offset of a tensor; or region -1 and its bytes."""


@dataclass(frozen=True)
class Parcel:
    """A packed message, for any number of processes, and its tensors, which must not be freed before it has been read."""

    data: bytes
    descriptions: tuple[_Description, ...]
    tensors: tuple[Tensor, ...]


def pack(message: Any, memory: SharedMemory, common: Mapping[int, int] | None = None) -> Parcel:
    """Pack a message, as `dump` does. Tensors that are not in shared memory yet are copied into it."""
    data, expanded = dump(message, common or {})
    tensors = [unexpanded(tensor) for tensor in expanded]
    positions = [memory.find(tensor) for tensor in tensors]
    large = [k for k, tensor in enumerate(tensors) if positions[k] is None and tensor.nbytes > INLINE]
    for k, copy in zip(large, memory.place([tensors[k] for k in large]) if large else (), strict=True):
        tensors[k], positions[k] = copy, memory.find(copy)
    shapes = [tuple(tensor.shape) for tensor in expanded]
    return Parcel(data, tuple(map(_description, tensors, shapes, positions)), tuple(tensors))


def _description(tensor: Tensor, shape: tuple[int, ...], position: tuple[int, int] | None) -> _Description:
    if position is not None:
        return tensor.dtype, tuple(tensor.shape), shape, *position
    values = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), shape, -1, values


class Channel:
    """One end of the pipe. Tensors from `receive` lie in the other side's memory, which may reuse it later."""

    def __init__(self, connection: Connection, memory: SharedMemory) -> None:
        self.connection, self.memory = connection, memory
        self._announced: set[int] = set()  # regions of this process that the other side has mapped
        self._mapped: dict[int, mmap.mmap] = {}  # regions of the other process that are mapped here

    def send(self, kind: str, parcel: Parcel) -> None:
        """Send a message packed with this end's memory. Raises `OSError` if the other process has ended."""
        regions = self.memory.regions
        added = sorted({region for *_, region, _ in parcel.descriptions} - self._announced - {-1})
        closed = [number for number in self._announced if number not in regions]
        header = kind, [(number, regions[number].size) for number in added], closed, parcel.descriptions, parcel.data
        self._announced = self._announced.difference(closed).union(added)
        self.connection.send_bytes(pickle.dumps(header, pickle.HIGHEST_PROTOCOL))
        if added:
            with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
                for number in added:
                    socket.send_fds(line, [b"\0"], [regions[number].descriptor])

    def receive(self) -> tuple[Any, Packed]:
        """Receive the next message and its kind. Raises `EOFError` or `OSError` if the other process has ended."""
        kind, added, closed, descriptions, data = pickle.loads(self.connection.recv_bytes())
        for number in closed:
            self._mapped.pop(number, None)
        if added:
            with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
                for number, size in added:
                    _, descriptors, _, _ = socket.recv_fds(line, 1, 1)
                    if not descriptors:
                        raise EOFError
                    self._mapped[number] = mmap.mmap(descriptors[0], size)
                    os.close(descriptors[0])
        return kind, (data, [self._tensor(*description) for description in descriptions])

    def _tensor(
        self, dtype: torch.dtype, stored: tuple[int, ...], shape: tuple[int, ...], region: int, content: int | bytes
    ) -> Tensor:
        """Return the tensor at the offset `content` of a region, or of the bytes `content`."""
        if isinstance(content, int):
            count = int(np.prod(stored, dtype=np.int64))
            tensor = torch.frombuffer(self._mapped[region], dtype=dtype, count=count, offset=content)
        elif content:
            # A copy, because sums may round differently on memory that is not aligned as PyTorch aligns its own.
            tensor = torch.frombuffer(bytearray(content), dtype=dtype).clone()
        else:
            tensor = torch.empty(0, dtype=dtype)
        return tensor.view(stored).expand(shape)
