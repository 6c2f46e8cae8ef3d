"""A pipe between two processes, and shared memory for tensors.

Tensors stay in shared memory, and the pipe transports their positions. Shared memory is a file
without a name. It does not count against the size of /dev/shm, and the system frees it when the
last process that maps it ends, also after a crash.
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
"""Size of the smallest region in bytes.

Sizes are powers of two, so that regions can be reused. Unused pages need no memory.
"""

INLINE = 4096
"""Largest size in bytes of tensors that are sent inside the message.

Tensors that are already in shared memory are never sent inside it.
"""

Position = tuple[int, int, int]
"""Start and size of a region, and an offset in the region, in bytes."""


def anonymous_file() -> int:
    """Return the descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedloom")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedMemory:
    """A file in memory that only this process extends, by one region at a time.

    Freed regions are reused, because new pages cost more than a copy.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = 0
        self.regions: dict[int, mmap.mmap] = {}  # by start
        self._idle: defaultdict[int, list[int]] = defaultdict(list)  # starts, by size
        self._addresses: list[tuple[int, int]] = []  # (address, start), sorted
        weakref.finalize(self, os.close, descriptor)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor.

        Args:
            shape: Shape of the tensor.
            dtype: Type of its numbers.

        Returns:
            The tensor, in a region of the shared memory. The region is used again after the tensor
            is freed.
        """
        size = prod(shape) * dtype.itemsize
        array, _ = self.region(size)
        return torch.from_numpy(array)[:size].view(dtype).view(*shape)

    def region(self, size: int) -> tuple[npt.NDArray[np.uint8], Position]:
        """Return an unused region of at least `size` bytes, and its position.

        Args:
            size: Number of bytes that are needed.

        Returns:
            The bytes, and their position: start, length and an offset of 0. The length is a power
            of 2.
        """
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
        """Return the position of an address of this process, or None if it is in no region."""
        index = bisect_right(self._addresses, address, key=lambda entry: entry[0]) - 1
        if index < 0:
            return None
        base, start = self._addresses[index]
        size = len(self.regions[start])
        return (start, size, address - base) if address < base + size else None


@dataclass(frozen=True)
class Parcel:
    """A packed message for one or several processes.

    Attributes:
        data: Pickled bytes.
        entries: Tensors by position and size in bytes, or as bytes.
        alive: Memory of the tensors. It must not be freed before the message has been read.
    """

    data: bytes
    entries: list[tuple[Position, int] | bytes]
    alive: list[Any]


def pack(message: Any, memory: SharedMemory, common: Mapping[int, int] | None = None) -> Parcel:
    """Pack a message. Tensors that are not in shared memory yet are copied into it.

    Args:
        message: The message.
        memory: Shared memory of this process.
        common: Indices of tensors that the receiver already has, by their ids (see `dump`).

    Returns:
        The pickled message, and the positions of its tensors. Small tensors are inside the parcel.
    """
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
    """One end of the pipe.

    Received tensors are in the memory of the other process, which may use it again.

    Args:
        connection: The pipe.
        memory: Shared memory of this process.
        peer_memory: File descriptor of the other process's shared memory.
    """

    def __init__(self, connection: Connection, memory: SharedMemory, peer_memory: int) -> None:
        self.connection = connection
        self.memory = memory
        self.peer_memory = peer_memory
        self._mapped: dict[int, mmap.mmap] = {}  # regions of the other process

    def send(self, *parcels: Parcel | None) -> None:
        """Send packed messages. Raises `OSError` if the other process has ended."""
        self.connection.send_bytes(
            pickle.dumps([parcel and (parcel.data, parcel.entries) for parcel in parcels])
        )

    def receive(self) -> list[Any]:
        """Receive the messages of one `send`.

        Raises:
            EOFError: If the other process has ended.
            OSError: If the other process has ended.
        """
        messages = pickle.loads(self.connection.recv_bytes())
        return [
            message and (message[0], [self._read(entry) for entry in message[1]])
            for message in messages
        ]

    def close(self) -> None:
        """Close this end of the pipe and the other process's memory."""
        self.connection.close()
        os.close(self.peer_memory)

    def _read(self, entry: tuple[Position, int] | bytes) -> Any:
        if isinstance(entry, bytes):
            # Copy it to memory with PyTorch's alignment: sums may round differently without it.
            if not entry:
                return entry
            return torch.frombuffer(bytearray(entry), dtype=torch.uint8).clone().numpy()
        (start, size, offset), count = entry
        if start not in self._mapped:
            self._mapped[start] = mmap.mmap(self.peer_memory, size, offset=start)
        return memoryview(self._mapped[start])[offset : offset + count]
