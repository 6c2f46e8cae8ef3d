"""A pipe between two processes. Tensors are in shared memory; only where to find them is sent through the pipe."""

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

_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int | bytes]
"""Dtype, shape in memory, shape when expanded, region and offset of a tensor; or region -1 and its bytes."""


@dataclass(frozen=True)
class Parcel:
    """A packed message, for any number of processes, and the tensors that must not be freed before it has been read."""

    data: bytes
    places: tuple[_Place, ...]
    held: tuple[Tensor, ...]


def pack(message: Any, memory: SharedMemory, known: Mapping[int, int] | None = None) -> Parcel:
    """Pack a message, as `dump` does. Tensors that are not in shared memory yet are copied into it."""
    data, whole = dump(message, known or {})
    tensors = [unexpanded(tensor) for tensor in whole]
    found = [memory.find(tensor) for tensor in tensors]
    large = [k for k, tensor in enumerate(tensors) if found[k] is None and tensor.nbytes > INLINE]
    for k, copy in zip(large, memory.place([tensors[k] for k in large]) if large else (), strict=True):
        tensors[k], found[k] = copy, memory.find(copy)
    shapes = [tuple(tensor.shape) for tensor in whole]
    return Parcel(data, tuple(map(_described, tensors, shapes, found)), tuple(tensors))


def _described(tensor: Tensor, shape: tuple[int, ...], place: tuple[int, int] | None) -> _Place:
    if place is not None:
        return tensor.dtype, tuple(tensor.shape), shape, place[0], place[1]
    inside = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), shape, -1, inside


class Channel:
    """One end of the pipe. Tensors that `receive` returns are in the other side's memory, which may reuse it later."""

    def __init__(self, connection: Connection, memory: SharedMemory) -> None:
        self.connection, self.memory = connection, memory
        self._announced: set[int] = set()  # our regions that the other side has mapped
        self._mapped: dict[int, mmap.mmap] = {}  # theirs that we have

    def send(self, kind: str, parcel: Parcel) -> None:
        """Send a message packed with this end's memory. Raises `OSError` when the other process has ended."""
        regions = self.memory.regions
        new = sorted({place[3] for place in parcel.places} - self._announced - {-1})
        gone = [number for number in self._announced if number not in regions]
        header = kind, [(number, regions[number].size) for number in new], gone, parcel.places, parcel.data
        self._announced = self._announced.difference(gone).union(new)
        self.connection.send_bytes(pickle.dumps(header, pickle.HIGHEST_PROTOCOL))
        if new:
            with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
                for number in new:
                    socket.send_fds(line, [b"\0"], [regions[number].descriptor])

    def receive(self) -> tuple[str, Packed]:
        """The next message and its kind. Raises `EOFError` or `OSError` when the other process has ended."""
        kind, new, gone, places, data = pickle.loads(self.connection.recv_bytes())
        for number in gone:
            self._mapped.pop(number, None)
        if new:
            with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
                for number, size in new:
                    _, descriptors, _, _ = socket.recv_fds(line, 1, 1)
                    if not descriptors:
                        raise EOFError
                    self._mapped[number] = mmap.mmap(descriptors[0], size)
                    os.close(descriptors[0])
        return kind, (data, [self._tensor(*place) for place in places])

    def _tensor(
        self, dtype: torch.dtype, lying: tuple[int, ...], shape: tuple[int, ...], region: int, place: int | bytes
    ) -> Tensor:
        if isinstance(place, int):
            count = int(np.prod(lying, dtype=np.int64))
            tensor = torch.frombuffer(self._mapped[region], dtype=dtype, count=count, offset=place)
        elif place:
            # A copy, because sums may round differently on memory that is not aligned as PyTorch aligns its own.
            tensor = torch.frombuffer(bytearray(place), dtype=dtype).clone()
        else:
            tensor = torch.empty(0, dtype=dtype)
        return tensor.view(lying).expand(shape)
