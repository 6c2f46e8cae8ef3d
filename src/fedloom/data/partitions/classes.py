"""Checks of partitions, and the dealing out of classes."""

from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import numpy_stream
from fedloom.data.partition import Indices, Partition

Concentration = Annotated[float, Field(ge=1e-9, le=1e9)]
"""A Dirichlet distribution's alpha, in the range that double precision can draw with."""

Exponent = Annotated[float, Field(ge=0, le=100)]
"""Strength of a skew: the deviation of a logarithm, or the exponent of a power."""


def partition_stream(
    labels: Indices, clients: int, seed: int, *, minimum: int = 1
) -> np.random.Generator:
    """Return the generator that draws a partition.

    Args:
        labels: Labels `[n]`.
        clients: Number of clients.
        seed: Seed of the generator.
        minimum: Number of samples that every client needs.

    Returns:
        A new generator at the beginning of the stream "partition".

    Raises:
        InvalidValue: There are too few samples, or no clients.
    """
    if clients < 1:
        raise InvalidValue(f"clients must be at least 1, not {clients}")
    if clients * minimum > len(labels):
        raise InvalidValue(
            f"{clients} clients with at least {minimum} of the samples each need "
            f"{clients * minimum}, "
            f"but there are {len(labels)}: at most {len(labels) // minimum} clients"
        )
    return numpy_stream(seed, "partition")


def equal_sizes(samples: int, clients: int) -> Indices:
    """Divide samples over clients: sizes differ by at most one, in falling order.

    Args:
        samples: Number of samples.
        clients: Number of clients.

    Returns:
        Sizes `[clients]`.
    """
    sizes = np.full(clients, samples // clients, dtype=np.int64)
    sizes[: samples % clients] += 1
    return sizes


def class_sizes(labels: Indices) -> Indices:
    """Count the samples of each class that occurs, in the order of the labels, `[classes]`."""
    return np.unique(labels, return_counts=True)[1].astype(np.int64)


def shuffled_by_class(labels: Indices, rng: np.random.Generator) -> Indices:
    """Return all samples, class by class and shuffled within each.

    Args:
        labels: Labels `[n]`.
        rng: Source of the draws.

    Returns:
        Samples `[n]`.
    """
    order = rng.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


def deal(samples: Indices, owners: Indices, clients: int, rng: np.random.Generator) -> Partition:
    """Assign samples to clients, each client's in random order.

    Args:
        samples: Samples `[n]`.
        owners: Client of each sample `[n]`, -1 for none.
        clients: Number of clients.
        rng: Source of the draws.

    Returns:
        The partition, without the samples that have no owner.
    """
    mixed = rng.permutation(len(samples))
    return Partition.from_owners(samples[mixed], owners[mixed], clients)


def cut_classes(
    labels: Indices, counts: npt.NDArray[np.int64], rng: np.random.Generator
) -> Partition:
    """Assign random samples of each class to clients; no client gets the others.

    Args:
        labels: Labels `[n]`.
        counts: Number of samples of each client and class that occurs, `[clients, classes]`.
        rng: Source of the draws.

    Returns:
        The partition. Each client's samples are in random order.
    """
    clients, classes = counts.shape
    unassigned = class_sizes(labels) - counts.sum(axis=0)
    numbers = np.concatenate([np.arange(clients), [-1]])
    owners = np.repeat(np.tile(numbers, classes), np.vstack([counts, unassigned]).T.ravel())
    return deal(shuffled_by_class(labels, rng), owners, clients, rng)
