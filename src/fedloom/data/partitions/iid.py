"""IID clients of equal size."""

from __future__ import annotations

import numpy as np

from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import deal, equal_sizes, require_clients, shuffled_by_class
from fedloom.randomness import numpy_stream


@partitions.register("iid")
def iid(labels: Indices, clients: int, seed: int, groups: Indices | None, *, balanced: bool = False) -> Partition:
    """Equal parts at random: shuffle, then cut; sizes differ by at most one.

    Args:
        balanced: Deal out every class, so that the clients' counts of each class differ by at most one (five images a class and
            client on CIFAR-100 with 100 clients, as in FedUmf's appendix).

    Source: FedMR (arXiv 2305.10730), FedUmf, experimental setup.
    """
    require_clients(clients, len(labels))
    rng = numpy_stream(seed, "partition")
    if not balanced:
        return Partition.from_sizes(rng.permutation(len(labels)), equal_sizes(len(labels), clients))
    seats = rng.permutation(clients)  # random, or the first clients would hold the odd samples of the first class
    owners = seats[np.arange(len(labels)) % clients]
    return deal(shuffled_by_class(labels, rng), owners, clients, rng)
