"""Quantity skew: clients of different sizes with one distribution of labels."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import Concentration, require_clients
from fedloom.data.partitions.lognormal import apportion
from fedloom.randomness import numpy_stream

Growth = Annotated[float, Field(ge=0, le=100)]


@partitions.register("quantity")
def quantity(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, alpha: Concentration = 0.5
) -> Partition:
    """Quantity skew, labels alike: client i holds a share q_i of the samples, q ~ Dir(alpha); smaller alpha, less balance.

    Shares become whole numbers of samples that add up to n, at least one a client.

    Args:
        alpha: The concentration, greater than 0.

    Source: Li, Diao, Chen, He, Federated Learning on Non-IID Data Silos, ICDE 2022, section IV (quantity skew).
    """
    require_clients(clients, len(labels))
    rng = numpy_stream(seed, "partition")
    return _dealt(labels, rng.dirichlet(np.full(clients, alpha)), rng)


@partitions.register("exponential")
def exponential(labels: Indices, clients: int, seed: int, groups: Indices | None, *, rate: Growth = 0.1) -> Partition:
    """Sizes that grow exponentially, labels alike: n_i in proportion to exp(rate i), i = 1 .. N; `rate` 0 is IID.

    Client N holds exp(rate (N - 1)) times as much as client 1; every client has at least one sample.

    Args:
        rate: In [0, 100].

    Source: Flower's ExponentialPartitioner (rate 1), in flwr_datasets.
    """
    require_clients(clients, len(labels))
    # exp(rate i) over exp(rate N), which double precision holds.
    return _dealt(labels, np.exp(rate * np.arange(1 - clients, 1)), numpy_stream(seed, "partition"))


@partitions.register("polynomial")
def polynomial(labels: Indices, clients: int, seed: int, groups: Indices | None, *, degree: Growth = 1.0) -> Partition:
    """Sizes that grow as a power, labels alike: n_i in proportion to i^degree, i = 1 .. N; `degree` 0 is IID.

    Every client has at least one sample.

    Args:
        degree: In [0, 100].

    Source: Flower's LinearPartitioner (degree 1) and SquarePartitioner (degree 2), in flwr_datasets.
    """
    require_clients(clients, len(labels))
    return _dealt(labels, (np.arange(1, clients + 1) / clients) ** degree, numpy_stream(seed, "partition"))


def _dealt(
    labels: Indices, weights: np.ndarray[tuple[int], np.dtype[np.float64]], rng: np.random.Generator
) -> Partition:
    """Deal out all samples at random to clients whose sizes are in proportion to `weights`."""
    # A Dirichlet vector may be all zeros but for one, and that one not finite, where alpha is tiny.
    return Partition.from_sizes(rng.permutation(len(labels)), apportion(np.nan_to_num(weights), len(labels)))
