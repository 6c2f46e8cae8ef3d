"""A pipe between two processes, and memory that they share: tensors stay in the memory, the pipe
carries their positions.

Shared memory is a file without a name: it cannot be left behind, does not count against the size of
/dev/shm, and is freed when the last process that maps it has ended, in whatever way.
"""

import mmap
import os
import pickle
import tempfile
import weakref
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.engines.pickling import dump

SMALLEST = 1 << 16
"""Bytes of the smallest region. Sizes are powers of two, so that regions can be reused; untouched
pages cost nothing.
"""

INLINE = 4096
"""Tensors of at most this many bytes, unless in shared memory already, are sent inside the message.
"""

Position = tuple[int, int, int]
"""Start and size of a region, and an offset in it."""


def anonymous_file() -> int:
    """Return the descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedloom")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedMemory:
    """A file that this process alone extends, by regions that are reused when freed: new pages cost
    more than a copy.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.size = descriptor, 0
        self.regions: dict[int, mmap.mmap] = {}  # by start
        self._idle: defaultdict[int, list[int]] = defaultdict(list)  # starts, by size
        self._addresses: list[tuple[int, int]] = []  # (address, start), sorted
        weakref.finalize(self, os.close, descriptor)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        size = prod(shape) * dtype.itemsize
        array, _ = self.region(size)
        return torch.from_numpy(array)[:size].view(dtype).view(*shape)

    def region(self, size: int) -> tuple[npt.NDArray[np.uint8], Position]:
        """Return an unused region of at least `size` bytes, and its position."""
        rounded = 1 << (max(size, SMALLEST) - 1).bit_length()
        idle = self._idle[rounded]
        if not idle:
            os.ftruncate(self.descriptor, self.size + rounded)
            region = mmap.mmap(self.descriptor, rounded, offset=self.size)
            insort(self._addresses, (np.frombuffer(region, np.uint8).ctypes.data, self.size))
            self.regions[self.size] = region
            idle.append(self.size)
            self.size += rounded
        start = idle.pop()
        array = np.frombuffer(self.regions[start], np.uint8)
        weakref.finalize(array, idle.append, start).atexit = False
        return array, (start, rounded, 0)

    def find(self, address: int) -> Position | None:
        """Return the position of an address of this process, or None if it lies elsewhere."""
        index = bisect_right(self._addresses, address, key=lambda entry: entry[0]) - 1
        if index < 0:
            return None
        base, start = self._addresses[index]
        size = len(self.regions[start])
        return (start, size, address - base) if address < base + size else None


@dataclass(frozen=True)
class Parcel:
    """A message for any number of processes: bytes, and its tensors' memory, which is kept `alive`
    until it has been read.
    """

    data: bytes
    entries: list[tuple[Position, int] | bytes]
    alive: list[Any]


def pack(message: Any, memory: SharedMemory, common: Mapping[int, int] | None = None) -> Parcel:
    """Pack a message, as `dump` does. Tensors that are not in shared memory yet are copied into it."""
    data, buffers = dump(message, common)
    entries: list[tuple[Position, int] | bytes] = []
    for index, buffer in enumerate(buffers):
        array = np.frombuffer(buffer.raw(), np.uint8)
        position = memory.find(array.ctypes.data)
        if position is None and len(array) > INLINE:
            buffers[index], position = memory.region(len(array))
            buffers[index][: len(array)] = array
        entries.append(
            array.tobytes() if position is None or not len(array) else (position, len(array))
        )
    return Parcel(data, entries, buffers)


class Channel:
    """One end of the pipe. Received tensors lie in the other side's memory, of descriptor
    `peer_memory`, which may reuse it.
    """

    def __init__(self, connection: Connection, memory: SharedMemory, peer_memory: int) -> None:
        self.connection, self.memory, self.peer_memory = connection, memory, peer_memory
        self._mapped: dict[int, mmap.mmap] = {}  # regions of the other process

    def send(self, *parcels: Parcel | None) -> None:
        """Send messages packed with this end's memory. Raises `OSError` if the other process has
        ended.
        """
        self.connection.send_bytes(
            pickle.dumps([parcel and (parcel.data, parcel.entries) for parcel in parcels])
        )

    def receive(self) -> list[Any]:
        """Receive messages that were sent together. Raises `EOFError` or `OSError` if the other
        process has ended.
        """
        messages = pickle.loads(self.connection.recv_bytes())
        return [
            message and (message[0], [self._at(entry) for entry in message[1]])
            for message in messages
        ]

    def close(self) -> None:
        """Close this end of the pipe and the other side's memory."""
        self.connection.close()
        os.close(self.peer_memory)

    def _at(self, entry: tuple[Position, int] | bytes) -> Any:
        if isinstance(entry, bytes):
            # A copy, because sums may round differently on memory that is not aligned as PyTorch
            # aligns its own.
            return (
                torch.frombuffer(bytearray(entry), dtype=torch.uint8).clone().numpy()
                if entry
                else entry
            )
        (start, size, offset), count = entry
        if start not in self._mapped:
            self._mapped[start] = mmap.mmap(self.peer_memory, size, offset=start)
        return memoryview(self._mapped[start])[offset : offset + count]
