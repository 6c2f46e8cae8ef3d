"""Clients that each hold the same number of labels, drawn at random."""

from __future__ import annotations

import numpy as np

from fedloom.config.fields import Count
from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import class_sizes, cut_classes, equal_sizes, require_clients
from fedloom.errors import InvalidValue
from fedloom.randomness import numpy_stream


@partitions.register("label_quantity")
def label_quantity(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, classes_per_client: Count = 2
) -> Partition:
    """Hold `classes_per_client` random classes a client, each class in equal parts over its holders.

    Client i holds class i modulo the number of classes; its further ones are drawn at random. With fewer clients than
    classes some may have no holder.

    Args:
        classes_per_client: Classes that a client holds, at most those that occur.

    Raises:
        InvalidValue: For more classes a client than occur, or a class with fewer samples than holders.

    Source: Li, Diao, Chen, He, Federated Learning on Non-IID Data Silos, ICDE 2022, section IV (quantity-based label imbalance).
    """
    sizes = class_sizes(labels)
    classes = len(sizes)
    require_clients(clients, len(labels))
    if classes_per_client > classes:
        raise InvalidValue(f"classes_per_client must be at most {classes}, the classes, not {classes_per_client}")
    rng = numpy_stream(seed, "partition")
    holders = np.zeros((clients, classes), dtype=bool)
    for client in range(clients):
        assigned = client % classes
        drawable = np.delete(np.arange(classes), assigned)
        holders[client, [assigned, *rng.choice(drawable, classes_per_client - 1, replace=False)]] = True
    counts = np.zeros((clients, classes), dtype=np.int64)
    for label, size in enumerate(sizes.tolist()):
        held_by = np.flatnonzero(holders[:, label])
        if size < len(held_by):
            raise InvalidValue(
                f"{len(held_by)} of {clients} clients must share class number {label}, which has {size} samples: "
                f"use fewer clients or a smaller classes_per_client"
            )
        if len(held_by):
            counts[held_by, label] = equal_sizes(size, len(held_by))
    return cut_classes(labels, counts, rng)
