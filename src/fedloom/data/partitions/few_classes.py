"""Clients with a few classes each, in groups that share them or drawn at random."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count
from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import (
    Exponent,
    class_sizes,
    cut_classes,
    equal_sizes,
    partition_stream,
)


@partitions.register("pathological")
def pathological(
    labels: Indices,
    clients: int,
    seed: int,
    groups: Indices | None,
    *,
    classes_per_client: Count = 2,
    balanced: bool = False,
    least: Count = 40,
) -> Partition:
    """A few classes a client: groups of clients share `classes_per_client` classes, with disjoint
    samples.

    Class after class goes to the first ceil(N k / C) clients that have fewer than k classes (k =
    `classes_per_client`, C classes). Of the n_c samples each of these m clients but the last gets a
    random whole number in [a, n_c / m) with a = max(n_c / (10 m), min(least, n / (2 N)) / C), the
    last one the remainder. If k does not divide C the clients at the end may have fewer than k
    classes, and classes for which no client remains (always so for N k < C) belong to no client, as
    in the authors' protocol.

    Args:
        classes_per_client: k.
        balanced: The m clients of a class get equal numbers of its samples.
        least: A client's least number of samples, as above.

    Returns:
        The partition. Samples of classes without a client are in no part.

    Raises:
        InvalidValue: For k > C or a class with fewer samples than clients to share it.

    Source: FedALA (Zhang et al., AAAI 2023) section 5.1, pathological setting, and its authors'
    partition.
    """
    rng, classes = _start(labels, clients, seed, classes_per_client)
    holders = np.zeros((clients, classes), dtype=bool)
    group = math.ceil(clients * classes_per_client / classes)
    for label in range(classes):
        holders[np.flatnonzero(holders.sum(axis=1) < classes_per_client)[:group], label] = True
    floor = min(least, len(labels) / (2 * clients)) / classes
    divide = equal_sizes if balanced else partial(_random_sizes, floor=floor, rng=rng)
    return _shared(labels, holders, divide, rng)


@partitions.register("label_quantity")
def label_quantity(
    labels: Indices,
    clients: int,
    seed: int,
    groups: Indices | None,
    *,
    classes_per_client: Count = 2,
) -> Partition:
    """Hold `classes_per_client` random classes a client, each class in equal parts over its
    holders.

    Client i holds class i modulo the number of classes; its further ones are drawn at random. With
    fewer clients than classes some may have no holder.

    Args:
        classes_per_client: Classes that a client holds, at most those that occur.

    Returns:
        The partition. Samples of classes without a holder are in no part.

    Raises:
        InvalidValue: For more classes a client than occur, or a class with fewer samples than
            holders.

    Source: Li, Diao, Chen, He, Federated Learning on Non-IID Data Silos, ICDE 2022, section IV
    (quantity-based label imbalance).
    """
    rng, classes = _start(labels, clients, seed, classes_per_client)
    holders = np.zeros((clients, classes), dtype=bool)
    for client in range(clients):
        assigned = client % classes
        drawn = rng.choice(
            np.delete(np.arange(classes), assigned), classes_per_client - 1, replace=False
        )
        holders[client, [assigned, *drawn]] = True
    return _shared(labels, holders, equal_sizes, rng)


@partitions.register("power_law")
def power_law(
    labels: Indices,
    clients: int,
    seed: int,
    groups: Indices | None,
    *,
    classes_per_client: Count = 2,
    least: Count = 5,
    sigma: Exponent = 2.0,
) -> Partition:
    """Sizes by a power law and a few consecutive classes a client.

    Client i holds the classes i, ..., i + k - 1 modulo the number of classes (k =
    `classes_per_client`). Each of the m clients of a class with n_c samples gets `least` of them,
    and the rest n_c - m `least` is divided in proportion to draws of LogNormal(0, sigma), rounded
    down. One random client of the class gets the samples that remain.

    Args:
        classes_per_client: k.
        least: Least number of samples of a class at each of its clients.
        sigma: The deviation of the logarithm, in [0, 100]; 0 is balanced.

    Raises:
        InvalidValue: For more classes a client than occur, or a class with fewer samples than its
            clients need.

    Source: Li et al. 2020 (FedProx), section 5.1 (MNIST), and Flower's DistributionPartitioner.
    """
    rng, classes = _start(labels, clients, seed, classes_per_client)
    held = (np.arange(clients)[:, None] + np.arange(classes_per_client)) % classes
    holders = np.zeros((clients, classes), dtype=bool)
    np.put_along_axis(holders, held, True, axis=1)

    def divide(size: int, members: int) -> Indices:
        rest = size - members * least
        if rest < 0:
            raise InvalidValue(
                f"least must be at most {size // members}, since {members} clients share a class "
                f"with {size} samples, not {least}"
            )
        exponents = sigma * rng.standard_normal(members)
        weights = np.exp(exponents - exponents.max())
        shares: Indices = np.floor(rest * weights / weights.sum()).astype(np.int64)
        sizes = least + shares
        sizes[rng.integers(members)] += size - sizes.sum()
        return sizes

    return _shared(labels, holders, divide, rng)


def _start(
    labels: Indices, clients: int, seed: int, classes_per_client: int
) -> tuple[np.random.Generator, int]:
    """Return the generator and the number of classes that occur, after a check of the numbers."""
    rng = partition_stream(labels, clients, seed)
    classes = len(class_sizes(labels))
    if classes_per_client > classes:
        raise InvalidValue(
            f"classes_per_client must be at most {classes}, the classes, not {classes_per_client}"
        )
    return rng, classes


def _shared(
    labels: Indices,
    holders: npt.NDArray[np.bool_],
    divide: Callable[[int, int], Indices],
    rng: np.random.Generator,
) -> Partition:
    """Assign each class to its `holders [clients, classes]`, to each the number of samples of
    `divide(samples, clients)`.
    """
    counts = np.zeros(holders.shape, dtype=np.int64)
    for label, size in enumerate(class_sizes(labels).tolist()):
        held_by = np.flatnonzero(holders[:, label])
        if size < len(held_by):
            raise InvalidValue(
                f"{len(held_by)} of {len(holders)} clients must share class number {label} "
                f"with {size} samples: "
                f"use fewer clients or a smaller classes_per_client"
            )
        if len(held_by):
            counts[held_by, label] = divide(size, len(held_by))
    return cut_classes(labels, counts, rng)


def _random_sizes(size: int, clients: int, floor: float, rng: np.random.Generator) -> Indices:
    """Divide `size` at random into numbers of at least 1, `[clients]`: in [a, size / clients), the
    last one the remainder.
    """
    fair = size / clients
    end = max(math.ceil(fair), 2)  # with one sample a client the interval is empty: all are 1
    begin = min(math.ceil(max(fair / 10, floor)), end - 1)
    drawn = rng.integers(begin, end, size=clients - 1)
    return np.append(drawn, size - drawn.sum())
