"""Helpers of the partition tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.common.expression import Call
from fedloom.data.partition import Indices, Partition, partitions


def make(
    name: str,
    labels: Indices,
    clients: int,
    seed: int = 0,
    groups: Indices | None = None,
    **options: Any,
) -> Partition:
    partition: Partition = partitions.build(
        Call(name, named=options), labels, clients, seed, groups
    )
    return partition


def some_labels(samples: int, classes: int, seed: int = 0) -> Indices:
    return np.random.default_rng(seed).integers(0, classes, samples)


def histogram_by_loops(partition: Partition, labels: Indices, classes: int) -> list[list[int]]:
    table = [[0] * classes for _ in range(len(partition))]
    for client in range(len(partition)):
        for sample in partition[client].tolist():
            table[client][labels[sample]] += 1
    return table


def assert_each_sample_once(partition: Partition, samples: int) -> None:
    assert sorted(partition.indices.tolist()) == list(range(samples))
