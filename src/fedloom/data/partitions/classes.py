"""Checks of partitions, and the dealing out of classes."""

from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedloom.data.partition import Indices, Partition
from fedloom.errors import InvalidValue
from fedloom.randomness import numpy_stream

Concentration = Annotated[float, Field(ge=1e-9, le=1e9)]
"""A Dirichlet distribution's alpha, in the range that double precision can draw with."""


def partition_stream(
    labels: Indices, clients: int, seed: int, *, minimum: int = 1
) -> np.random.Generator:
    """Return the generator that draws a partition; raises `InvalidValue` unless every client can
    have `minimum` samples.
    """
    if clients < 1:
        raise InvalidValue(f"clients must be at least 1, not {clients}")
    if clients * minimum > len(labels):
        raise InvalidValue(
            f"{clients} clients with at least {minimum} of the samples each need {clients * minimum}, "
            f"but there are {len(labels)}: at most {len(labels) // minimum} clients"
        )
    return numpy_stream(seed, "partition")


def equal_sizes(samples: int, clients: int) -> Indices:
    """Divide `samples` over `clients`, `[clients]`: sizes differ by at most one, in falling order."""
    sizes = np.full(clients, samples // clients, dtype=np.int64)
    sizes[: samples % clients] += 1
    return sizes


def class_sizes(labels: Indices) -> Indices:
    """Count the samples of each class that occurs, in the order of the labels, `[classes]`."""
    return np.unique(labels, return_counts=True)[1].astype(np.int64)


def shuffled_by_class(labels: Indices, rng: np.random.Generator) -> Indices:
    """Return all samples, class by class and shuffled within each, `[n]`."""
    order = rng.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


def deal(samples: Indices, owners: Indices, clients: int, rng: np.random.Generator) -> Partition:
    """Assign sample `samples[j]` to client `owners[j]` (-1: to none), each client's in random
    order.
    """
    mixed = rng.permutation(len(samples))
    return Partition.from_owners(samples[mixed], owners[mixed], clients)


def cut_classes(
    labels: Indices, counts: npt.NDArray[np.int64], rng: np.random.Generator
) -> Partition:
    """Assign `counts[i, c]` random samples of class c to client i (`[clients, classes that
    occur]`); no client gets the others.
    """
    clients, classes = counts.shape
    unassigned = class_sizes(labels) - counts.sum(axis=0)
    numbers = np.concatenate([np.arange(clients), [-1]])
    owners = np.repeat(np.tile(numbers, classes), np.vstack([counts, unassigned]).T.ravel())
    return deal(shuffled_by_class(labels, rng), owners, clients, rng)
