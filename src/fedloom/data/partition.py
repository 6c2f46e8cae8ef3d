"""A partition: which samples each client holds, in training and in its own test part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedloom.config.registry import Registry
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.errors import DataError, InvalidValue
from fedloom.randomness import stream_seed
from fedloom.state.files import not_written, replacing

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """Client i holds the samples `indices[offsets[i]:offsets[i + 1]]`. One array for all clients: a million of them cost
    a million numbers, and reading one client touches no other. The order within a client carries no meaning; what the
    registered partitions and `split_train_test` return is in random order, so any leading part is a fair sample."""

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

    @classmethod
    def from_owners(cls, samples: Indices, owners: Indices, clients: int) -> Partition:
        """Sample `samples[j]` goes to client `owners[j]`, or to none where that is -1; the order of `samples` is kept."""
        sizes = np.bincount(owners + 1, minlength=clients + 1)
        order = np.argsort(owners, kind="stable")
        return cls.from_sizes(samples[order[sizes[0] :]], sizes[1:])

    @classmethod
    def counted(cls, sizes: npt.ArrayLike) -> Partition:
        """How many samples each client holds, and not which: they are at the clients' own sites."""
        return cls(np.empty(0, np.int64), cls.from_sizes(np.empty(int(np.sum(sizes)), np.int64), sizes).offsets)

    @property
    def elsewhere(self) -> bool:
        """Whether only the numbers of samples are known here."""
        return bool(len(self.indices) != self.offsets[-1])

    def take(self, clients: Sequence[int]) -> Partition:
        """These clients in this order, numbered from 0."""
        if self.elsewhere:
            return Partition.counted(self.sizes[list(clients)])
        return Partition.of([self[client] for client in clients])

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

    def save(self, path: str | Path) -> None:
        """Write to `path` as an npz archive of two plain arrays, `indices` and `offsets`; all of it or nothing.

        Raises `CheckpointError` when it cannot be written.
        """
        target = Path(path)
        try:
            with replacing(target) as temporary, temporary.open("wb") as file:
                np.savez(file, indices=self.indices, offsets=self.offsets)
        except OSError as error:
            raise not_written(target, error, self.indices.nbytes + self.offsets.nbytes) from None

    @classmethod
    def load(cls, path: str | Path) -> Partition:
        """Read what `save` wrote. Nothing in the file is run: an archive with Python objects inside is refused.

        Raises `DataError` when the file is missing, damaged or does not hold a partition.
        """
        found = read_arrays(Path(path))
        for name in ("indices", "offsets"):
            if name not in found:
                raise DataError(f"{path} is not a partition file: it has no array {name!r}")
            if found[name].ndim != 1 or found[name].dtype.kind not in "iu":
                shape = list(found[name].shape)
                raise DataError(f"{path}: {name} must be one row of whole numbers, not {found[name].dtype} {shape}")
        indices, offsets = (np.asarray(found[name], dtype=np.int64) for name in ("indices", "offsets"))
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
            raise DataError(f"{path}: offsets must rise from 0 to {len(indices)}, the number of indices")
        return cls(indices, offsets)


def split_train_test(partition: Partition, seed: int, fraction: float = 0.25) -> tuple[Partition, Partition]:
    """Each client's samples at random into (train, test), so that a client is tested on its own distribution.

    Of a client's n samples floor((1 - fraction) n) train, but at least one, and at most n - 1 where n >= 2; the others
    test. Drawn as `draw_from_each` draws, so one site can repeat its own split. Raises `InvalidValue` unless
    0 < fraction < 1. Source: FedALA (Zhang et al., AAAI 2023), experimental setup: 75 % / 25 %.
    """
    if not 0 < fraction < 1:
        raise InvalidValue(f"fraction (the share that tests) must lie between 0 and 1, not {fraction}")
    sizes = partition.sizes
    # The small addition keeps a product such as (1 - 0.9) * 10 = 0.9999999999999998 from losing a sample.
    kept = np.floor((1 - fraction) * sizes + 1e-9).astype(np.int64)
    kept = np.clip(kept, np.minimum(sizes, 1), np.maximum(sizes - 1, np.minimum(sizes, 1)))
    return draw_from_each(partition, kept, seed, "train/test split")


def draw_from_each(partition: Partition, counts: Indices, seed: int, purpose: str) -> tuple[Partition, Partition]:
    """`counts[i]` of client i's samples at random, and the rest, both in random order.

    Which ones depends on the stream (`seed`, `purpose`) and on the client's own samples alone: a client, whatever its
    number and beside whomever, draws alike.
    """
    sizes = partition.sizes
    owners = np.repeat(np.arange(len(partition)), sizes)
    shuffled = partition.indices[np.lexsort((sample_keys(partition.indices, seed, purpose), owners))]
    rank = np.arange(len(shuffled)) - np.repeat(partition.offsets[:-1], sizes)
    drawn = rank < np.repeat(counts, sizes)
    return Partition.from_sizes(shuffled[drawn], counts), Partition.from_sizes(shuffled[~drawn], sizes - counts)


def sample_keys(samples: Indices, seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """A random 64-bit key for each sample: the output number `samples[j]` of a SplitMix64 generator.

    A generator that is addressed by position gives every client its own stream without a million generators.
    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, Fig. 14 (mix64variant13).
    """
    state = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream_seed(seed, purpose))
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


# A partition is a pure function (labels, clients, seed, groups, *, parameters) -> Partition:
# `labels [n]` int64, `clients` how many, `seed`, `groups [n]` the natural client of each sample or None.
partitions: Registry[Callable[..., Partition]] = Registry("partition", "fedloom.data.partitions")
