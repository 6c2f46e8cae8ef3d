"""Tensors in memory that several processes share.

Regions of shared memory have no name in the file system: they cannot be left behind, do not count against the size of /dev/shm,
and are freed when the last process that maps them has ended, in whatever way."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedloom.engines.pickling import unexpanded

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
