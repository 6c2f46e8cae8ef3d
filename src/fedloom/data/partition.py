"""Partitions: the samples of each client, for training and for its own test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedloom.common.errors import DataError, InvalidValue, error_text
from fedloom.common.plugins import found_at
from fedloom.common.randomness import stream_seed
from fedloom.common.registry import Registry
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.state.files import not_written, replacing

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class Partition:
    """Assignment of samples to clients: client i holds the samples `indices[offsets[i]:offsets[i +
    1]]`.

    One array serves all clients: a million of them cost a million numbers. Registered partitions
    and `split_train_test` return each client's samples in random order, so the samples at its
    beginning are a fair draw.

    Args:
        indices: Sample indices, client after client, `[n]` int64.
        offsets: The beginning of each client, and n, `[clients + 1]` int64.
    """

    indices: Indices
    offsets: Indices

    @classmethod
    def of(cls, samples: Sequence[npt.ArrayLike]) -> "Partition":
        """Return the partition of an array of sample indices, or a mask of all samples, for each
        client.
        """
        masks = [np.asarray(client) for client in samples]
        arrays = [
            np.flatnonzero(mask) if mask.dtype == bool else np.asarray(mask, dtype=np.int64)
            for mask in masks
        ]
        indices = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        return cls.from_sizes(indices, [len(array) for array in arrays])

    @classmethod
    def from_sizes(cls, indices: npt.ArrayLike, sizes: npt.ArrayLike) -> "Partition":
        """Return the partition into consecutive runs of samples.

        Args:
            indices: Samples `[n]`.
            sizes: Number of samples of each client, `[clients]`.

        Returns:
            The partition. Client 0 gets the first run.

        Raises:
            InvalidValue: The sizes do not add up to n.
        """
        taken = np.asarray(indices, dtype=np.int64)
        offsets = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, dtype=np.int64))]
        )
        if offsets[-1] != len(taken):
            raise InvalidValue(f"sizes add up to {offsets[-1]}, not to the {len(taken)} indices")
        return cls(taken, offsets)

    @classmethod
    def from_owners(cls, samples: Indices, owners: Indices, clients: int) -> "Partition":
        """Return the partition of samples with an owner, in the order of the samples.

        Args:
            samples: Samples `[n]`.
            owners: Client of each sample `[n]`, -1 for none.
            clients: Number of clients.

        Returns:
            The partition. Clients without a sample are empty.
        """
        sizes = np.bincount(owners + 1, minlength=clients + 1)
        order = np.argsort(owners, kind="stable")
        return cls.from_sizes(samples[order[sizes[0] :]], sizes[1:])

    @classmethod
    def counted(cls, sizes: npt.ArrayLike) -> "Partition":
        """Return a partition of samples at the clients' own sites, of which only the numbers are
        available.
        """
        return cls(
            np.empty(0, np.int64),
            cls.from_sizes(np.empty(int(np.sum(sizes)), np.int64), sizes).offsets,
        )

    @property
    def elsewhere(self) -> bool:
        """True if only the numbers of samples are available."""
        return bool(len(self.indices) != self.offsets[-1])

    def take(self, clients: Sequence[int]) -> "Partition":
        """Return the partition of these clients, numbered from 0 in this order."""
        if self.elsewhere:
            return Partition.counted(self.sizes[list(clients)])
        return Partition.of([self[client] for client in clients])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Partition of {self.summary()}"

    def summary(self, samples: str = "samples") -> str:
        """Return the number of clients and of their samples.

        Args:
            samples: Word for the samples, such as `training samples`.
        """
        if not len(self):
            return "no clients"
        smallest, largest = int(self.sizes.min()), int(self.sizes.max())
        sizes = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
        return f"{len(self):,} clients with {sizes} {samples}, {self.offsets[-1]:,} in total"

    def __getitem__(self, client: int) -> Indices:
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Indices:
        """Samples of each client, `[clients]`."""
        return np.diff(self.offsets)

    def histogram(self, labels: Indices, classes: int) -> npt.NDArray[np.int64]:
        """Count the samples of each client and class, as a bubble chart draws them.

        Args:
            labels: Labels of all samples.
            classes: Number of classes.

        Returns:
            `[clients, classes]`.
        """
        owner = np.repeat(np.arange(len(self)), self.sizes)
        counts = np.bincount(owner * classes + labels[self.indices], minlength=len(self) * classes)
        return counts.reshape(len(self), classes).astype(np.int64)

    def save(self, path: str | Path) -> None:
        """Write an npz archive of two plain arrays, `indices` and `offsets`, all of it or nothing.

        Raises:
            CheckpointError: If it cannot be written.
        """
        target = Path(path)
        try:
            with replacing(target) as temporary, temporary.open("wb") as file:
                np.savez(file, indices=self.indices, offsets=self.offsets)
        except OSError as error:
            raise not_written(target, error, self.indices.nbytes + self.offsets.nbytes) from None

    @classmethod
    def load(cls, path: str | Path) -> "Partition":
        """Read a file of `save`. Nothing in it is run: an archive with Python objects inside is
        refused.

        Raises:
            DataError: If the file is missing, damaged or does not hold a partition.
        """
        arrays = read_arrays(Path(path))
        for name in ("indices", "offsets"):
            if name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu":
                raise DataError(
                    f"{path} is no partition file: its array {name!r} must be one row of whole "
                    "numbers"
                )
        indices, offsets = (arrays[name].astype(np.int64) for name in ("indices", "offsets"))
        if (
            len(offsets) == 0
            or offsets[0] != 0
            or offsets[-1] != len(indices)
            or (np.diff(offsets) < 0).any()
        ):
            raise DataError(
                f"{path}: offsets must rise from 0 to {len(indices)}, the number of indices"
            )
        return cls(indices, offsets)


def split_train_test(
    partition: Partition, seed: int, fraction: float = 0.25
) -> tuple[Partition, Partition]:
    """Split each client's samples at random, so that a client is tested on its own distribution.

    Of a client's n samples floor((1 - fraction) n) train, but at least one, and at most n - 1 where
    n >= 2. Drawn as `draw_from_each` draws, so a site can repeat its own split.

    Args:
        partition: Samples of each client.
        seed: Seed of the draw.
        fraction: Share that tests, in (0, 1).

    Returns:
        The partitions of training and of test samples.

    Raises:
        InvalidValue: The fraction is not in (0, 1).

    Source: FedALA (Zhang et al., AAAI 2023), experimental setup: 75 % / 25 %.
    """
    if not 0 < fraction < 1:
        raise InvalidValue(
            f"fraction (the share of test samples) must be between 0 and 1, not {fraction}"
        )
    sizes = partition.sizes
    # The small addition keeps a product such as (1 - 0.9) * 10 = 0.9999999999999998 from losing a
    # sample.
    counts = np.floor((1 - fraction) * sizes + 1e-9).astype(np.int64)
    counts = np.clip(counts, np.minimum(sizes, 1), np.maximum(sizes - 1, np.minimum(sizes, 1)))
    return draw_from_each(partition, counts, seed, "train/test split")


def draw_from_each(
    partition: Partition, counts: Indices, seed: int, purpose: str
) -> tuple[Partition, Partition]:
    """Split off random samples of each client; the draw depends on its own samples only.

    Args:
        partition: Samples of each client.
        counts: Number of samples to split off, `[clients]`.
        seed: Seed of the draw.
        purpose: Name of the random stream.

    Returns:
        The partitions of the samples split off and of the others.
    """
    sizes = partition.sizes
    owners = np.repeat(np.arange(len(partition)), sizes)
    shuffled = partition.indices[
        np.lexsort((sample_keys(partition.indices, seed, purpose), owners))
    ]
    rank = np.arange(len(shuffled)) - np.repeat(partition.offsets[:-1], sizes)
    drawn = rank < np.repeat(counts, sizes)
    return Partition.from_sizes(shuffled[drawn], counts), Partition.from_sizes(
        shuffled[~drawn], sizes - counts
    )


def sample_keys(samples: Indices, seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """Return a random 64-bit key for each sample: the output number `samples[j]` of a SplitMix64
    generator.

    Args:
        samples: Samples `[n]`.
        seed: Seed of the generator.
        purpose: Name of its random stream.

    Returns:
        Keys `[n]`.
    """
    # Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, Fig. 14
    # (mix64variant13)
    state = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        stream_seed(seed, purpose)
    )
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


# A partition is a pure function (labels, clients, seed, groups, *, options) -> Partition, which
# raises `InvalidValue` for fewer than one client or more clients than samples: `labels [n]` int64,
# `clients` their number, `seed`, `groups [n]` the natural client of each sample or None.
partitions: Registry[Callable[..., Partition]] = Registry("partition", "fedloom.data.partitions")


def build_partition(
    partition: Any, labels: Indices, clients: int, seed: int, groups: Indices | None
) -> Partition:
    """Return a partition of a name, a function or samples.

    Args:
        partition: A registered name, a function or its path `module:name`, or each client's sample
            indices. A function is called with as many of the other arguments as it takes, and
            returns a `Partition` or the indices.
        labels: Labels `[n]`.
        clients: Number of clients.
        seed: Seed of the draw.
        groups: Natural client of each sample, `[n]` or None.

    Returns:
        The partition. Samples without a client are in no part.

    Raises:
        InvalidValue: `partition` is anything else.
        DataError: A sample does not exist or has two clients.
    """
    if isinstance(partition, Partition):
        return partition
    if isinstance(partition, str) and ":" not in partition.partition("(")[0]:
        return cast(Partition, partitions.build(partition, labels, clients, seed, groups))
    if isinstance(partition, str):
        partition = found_at(
            partition, "partition", "a registered name or 'package.module:function'"
        )
    try:
        if callable(partition):
            partition = partition(
                *(labels, clients, seed, groups)[: len(signature(partition).parameters)]
            )
        built = partition if isinstance(partition, Partition) else Partition.of(partition)
    except Exception as error:
        reason = (
            "partition must be a name, a function or each client's sample indices, such "
            "as [[0, 2], [1, 3]]"
        )
        raise InvalidValue(f"{reason}: {error_text(error)}") from error
    require_samples(built, len(labels), "partition")
    return built


def require_samples(partition: Partition, samples: int, source: str) -> None:
    """Raise `DataError` for samples that do not exist or have two clients.

    Args:
        partition: Samples of each client.
        samples: Number of samples.
        source: Name of the partition.
    """
    outside = partition.indices[(partition.indices < 0) | (partition.indices >= samples)]
    if len(outside):
        raise DataError(
            f"{source} holds sample {outside[0]}, but the data end at sample {samples - 1}"
        )
    holders = np.bincount(partition.indices, minlength=samples)
    if (holders > 1).any():
        raise DataError(
            f"{source} holds sample {holders.argmax()} {holders.max()} times: every sample has "
            "one client"
        )
