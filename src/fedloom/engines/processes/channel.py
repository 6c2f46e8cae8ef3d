"""A pipe between two processes, and memory that they share: tensors stay in the memory, the pipe carries their positions.

Regions of shared memory have no name in the file system: they cannot be left behind, do not count against the size of /dev/shm,
and are freed when the last process that maps them has ended, in whatever way.
"""

import mmap
import os
import pickle
import socket
import tempfile
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.engines.client_work import Packed
from fedloom.engines.pickling import dump, unexpanded

ALIGNMENT = 64
SMALLEST = 1 << 16
"""Bytes of the smallest region. Sizes are powers of two, so that regions can be reused; untouched pages cost nothing."""


class Region:
    """A piece of shared memory that this process opened; other processes map it by its file descriptor."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.descriptor = _anonymous(size)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self.memory = mmap.mmap(self.descriptor, size)
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)


class SharedMemory:
    """The regions that this process opened, reused when their tensors are freed: new pages cost more than a copy."""

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}
        self._idle: defaultdict[int, list[int]] = defaultdict(list)  # numbers, by size
        self._addresses: list[tuple[int, int]] = []  # (address, number), sorted
        self._next = 0

    def empty(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Return uninitialised tensors, together in one region."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        region = self._reserve(end)
        return [
            region[start : start + size].view(dtype).view(*shape)
            for start, size, shape, dtype in zip(starts, sizes, shapes, dtypes, strict=True)
        ]

    def place(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the tensors, together in one region. Expanded tensors stay expanded."""
        sources = [unexpanded(tensor.detach()) for tensor in tensors]
        copies = self.empty([tensor.shape for tensor in sources], [tensor.dtype for tensor in sources])
        for copy, tensor in zip(copies, sources, strict=True):
            copy.copy_(tensor)
        return [copy.expand(tensor.shape) for copy, tensor in zip(copies, tensors, strict=True)]

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return region and offset of a contiguous tensor in shared memory, else None."""
        if not tensor.is_contiguous() or tensor.numel() == 0 or tensor.is_cuda:
            return None
        address = tensor.data_ptr()
        index = bisect_right(self._addresses, address, key=lambda entry: entry[0]) - 1
        if index < 0:
            return None
        base, number = self._addresses[index]
        return (number, address - base) if address < base + self.regions[number].size else None

    def trim(self) -> None:
        """Close the unused regions."""
        for numbers in self._idle.values():
            for number in numbers:
                del self.regions[number]
            numbers.clear()
        self._index()

    def _reserve(self, size: int) -> Tensor:
        """Return a region of at least `size` bytes, as a tensor of bytes."""
        rounded = 1 << (max(size, SMALLEST) - 1).bit_length()
        numbers = self._idle[rounded]
        if not numbers:
            self.regions[self._next] = Region(self._next, rounded)
            numbers.append(self._next)
            self._next += 1
            self._index()
        number = numbers.pop()
        array = np.frombuffer(self.regions[number].memory, np.uint8)
        weakref.finalize(array, numbers.append, number).atexit = False
        return torch.from_numpy(array)

    def _index(self) -> None:
        self._addresses = sorted((region.address, number) for number, region in self.regions.items())


def _anonymous(size: int) -> int:
    """Return the descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fedloom")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


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
            count = prod(stored)
            tensor = torch.frombuffer(self._mapped[region], dtype=dtype, count=count, offset=content)
        elif content:
            # A copy, because sums may round differently on memory that is not aligned as PyTorch aligns its own.
            tensor = torch.frombuffer(bytearray(content), dtype=dtype).clone()
        else:
            tensor = torch.empty(0, dtype=dtype)
        return tensor.view(stored).expand(shape)
