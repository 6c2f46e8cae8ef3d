"""Clients with a few classes each, in groups that share them."""

from __future__ import annotations

import math

import numpy as np

from fedloom.config.fields import Count
from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import class_sizes, cut_classes, equal_sizes, require_clients
from fedloom.errors import InvalidValue
from fedloom.randomness import numpy_stream


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
    """A few classes a client: groups of clients share `classes_per_client` classes, with disjoint samples.

    Class after class goes to the first ceil(N k / C) clients that have fewer than k classes (k = `classes_per_client`,
    C classes). Of the n_c samples each of these m clients but the last gets a random whole number in [a, n_c / m) with
    a = max(n_c / (10 m), min(least, n / (2 N)) / C), the last one the remainder.
    If k does not divide C the clients at the end may have fewer than k classes, and classes for which no client remains
    (always so for N k < C) are held by nobody, as in the authors' protocol.

    Args:
        classes_per_client: k.
        balanced: The m clients of a class get equal numbers of its samples.
        least: A client's least number of samples, as above.

    Raises:
        InvalidValue: For k > C or a class with fewer samples than clients to share it.

    Source: FedALA (Zhang et al., AAAI 2023) section 5.1, pathological setting, and its authors' partition.
    """
    sizes = class_sizes(labels)
    require_clients(clients, len(labels))
    if classes_per_client > len(sizes):
        raise InvalidValue(f"classes_per_client must be at most {len(sizes)}, the classes, not {classes_per_client}")
    rng = numpy_stream(seed, "partition")
    floor = min(least, len(labels) / (2 * clients)) / len(sizes)
    group = math.ceil(clients * classes_per_client / len(sizes))
    quota = np.full(clients, classes_per_client)
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    for label, size in enumerate(sizes.tolist()):
        chosen = np.flatnonzero(quota)[:group]
        if len(chosen) == 0:
            break
        if size < len(chosen):
            raise InvalidValue(
                f"{len(chosen)} of {clients} clients must share class number {label}, which has {size} samples: "
                f"use fewer clients or a smaller classes_per_client"
            )
        counts[chosen, label] = (
            equal_sizes(size, len(chosen)) if balanced else _random_sizes(size, len(chosen), floor, rng)
        )
        quota[chosen] -= 1
    return cut_classes(labels, counts, rng)


def _random_sizes(size: int, clients: int, floor: float, rng: np.random.Generator) -> Indices:
    """Divide `size` at random into numbers of at least 1, `[clients]`: in [a, size / clients), the last one the remainder."""
    fair = size / clients
    end = max(math.ceil(fair), 2)  # with one sample a client the interval is empty: all are 1
    begin = min(math.ceil(max(fair / 10, floor)), end - 1)
    drawn = rng.integers(begin, end, size=clients - 1)
    return np.append(drawn, size - drawn.sum())
