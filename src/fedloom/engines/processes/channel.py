"""A pipe between two processes through which tensors travel in shared memory, and only words about them as bytes."""

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
"""Bytes up to which a tensor that is not in shared memory travels inside the message."""

_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int | bytes]
"""Type, shape in memory, shape, region and offset of a tensor; or region -1 and its bytes."""


@dataclass(frozen=True)
class Parcel:
    """A message ready to be sent, to as many processes as wanted, and the tensors that must live until it has been read."""

    data: bytes
    places: tuple[_Place, ...]
    held: tuple[Tensor, ...]


def pack(message: Any, memory: SharedMemory, known: Mapping[int, int] | None = None) -> Parcel:
    """Make a message ready, as `dump` does. Tensors that lie in shared memory stay there, the others are copied into it."""
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
    """One end of the pipe. `receive` returns tensors that lie in the other side's memory: they are lent, not given."""

    def __init__(self, connection: Connection, memory: SharedMemory) -> None:
        self.connection, self.memory = connection, memory
        self._announced: set[int] = set()  # our regions that the other side has mapped
        self._mapped: dict[int, mmap.mmap] = {}  # theirs that we have

    def send(self, kind: str, parcel: Parcel) -> None:
        """Send a message packed with this end's memory. Raises `OSError` when nobody is at the other end."""
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
        """The next message and of what kind it is. Raises `EOFError` or `OSError` when nobody is at the other end any more."""
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
            # Sums may round differently where memory begins off the boundaries that torch's own tensors keep: hence a copy.
            tensor = torch.frombuffer(bytearray(place), dtype=dtype).clone()
        else:
            tensor = torch.empty(0, dtype=dtype)
        return tensor.view(lying).expand(shape)
