"""A partition: which samples each client holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.errors import InvalidValue
from fedloom.registry import Registry

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """Client i holds the samples `indices[offsets[i]:offsets[i + 1]]`. One array for all clients: a million of them cost
    a million numbers, and reading one client touches no other."""

    indices: Indices
    offsets: Indices

    @classmethod
    def of(cls, parts: Sequence[npt.ArrayLike]) -> Partition:
        """From one array of sample indices for each client."""
        arrays = [np.asarray(part, dtype=np.int64) for part in parts]
        indices = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        return cls.from_sizes(indices, [len(array) for array in arrays])

    @classmethod
    def from_sizes(cls, indices: npt.ArrayLike, sizes: npt.ArrayLike) -> Partition:
        """Consecutive runs of `indices`, `sizes[i]` of them for client i."""
        taken = np.asarray(indices, dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, dtype=np.int64))])
        if offsets[-1] != len(taken):
            raise InvalidValue(f"sizes add up to {offsets[-1]}, not to the {len(taken)} indices")
        return cls(taken, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Indices:
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Indices:
        """Samples of each client, `[clients]`."""
        return np.diff(self.offsets)

    def histogram(self, labels: Indices, classes: int) -> npt.NDArray[np.int64]:
        """Samples of each client and class, `[clients, classes]`: what a bubble chart draws."""
        owner = np.repeat(np.arange(len(self)), self.sizes)
        counts = np.bincount(owner * classes + labels[self.indices], minlength=len(self) * classes)
        return counts.reshape(len(self), classes).astype(np.int64)


# A partition is a pure function (labels, clients, seed, groups, *, parameters) -> Partition:
# `labels [n]` int64, `clients` how many, `seed`, `groups [n]` the natural client of each sample or None.
partitions: Registry[Callable[..., Partition]] = Registry("partition", "fedloom.data.partitions")
