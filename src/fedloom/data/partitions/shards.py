"""Shards of the samples sorted by label, a few for each client."""

from __future__ import annotations

import numpy as np

from fedloom.config.fields import Count
from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import deal, equal_sizes, require_clients, shuffled_by_class
from fedloom.randomness import numpy_stream


@partitions.register("shards")
def shards(labels: Indices, clients: int, seed: int, groups: Indices | None, *, per_client: Count = 2) -> Partition:
    """Shards of the samples sorted by label: N x `per_client` equal shards, `per_client` at random to each client.

    Shards differ in size by at most one, and a client has about `per_client` classes (200 shards of 300 images for
    MNIST with 100 clients: at most two classes in most clients).

    Args:
        per_client: The shards of a client.

    Source: McMahan et al., AISTATS 2017, section 3; FedUmf, non-IID setting.
    """
    require_clients(clients, len(labels), minimum=per_client)
    rng = numpy_stream(seed, "partition")
    holders = rng.permutation(np.repeat(np.arange(clients), per_client))
    owners = np.repeat(holders, equal_sizes(len(labels), len(holders)))
    return deal(shuffled_by_class(labels, rng), owners, clients, rng)
