"""Clients of equal size: IID, shards of the samples sorted by label, and mixtures of both."""

import numpy as np

from fedloom.common.fields import Count, Probability
from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import deal, equal_sizes, partition_stream, shuffled_by_class


@partitions.register("iid")
def iid(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, balanced: bool = False
) -> Partition:
    """Equal parts at random: shuffle, then cut; sizes differ by at most one.

    Args:
        balanced: Deal out every class, so that the clients' counts of each class differ by at most
            one (five images a class and client on CIFAR-100 with 100 clients, as in FedUmf's
            appendix).

    Returns:
        The partition. Each sample has one client.

    Source: FedMR (arXiv 2305.10730), FedUmf, experimental setup.
    """
    rng = partition_stream(labels, clients, seed)
    if not balanced:
        return Partition.from_sizes(rng.permutation(len(labels)), equal_sizes(len(labels), clients))
    # random, or the first clients would hold the odd samples of the first class
    seats = rng.permutation(clients)
    owners = seats[np.arange(len(labels)) % clients]
    return deal(shuffled_by_class(labels, rng), owners, clients, rng)


@partitions.register("shards")
def shards(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, per_client: Count = 2
) -> Partition:
    """Shards of the samples sorted by label: N x `per_client` equal shards, `per_client` at random
    to each client.

    Shards differ in size by at most one, and a client has about `per_client` classes (200 shards of
    300 images for MNIST with 100 clients: at most two classes in most clients).

    Args:
        per_client: The shards of a client.

    Returns:
        The partition. Each sample has one client.

    Source: McMahan et al., AISTATS 2017, section 3; FedUmf, non-IID setting.
    """
    rng = partition_stream(labels, clients, seed, minimum=per_client)
    holders = rng.permutation(np.repeat(np.arange(clients), per_client))
    owners = np.repeat(holders, equal_sizes(len(labels), len(holders)))
    return deal(shuffled_by_class(labels, rng), owners, clients, rng)


@partitions.register("similarity")
def similarity(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, share: Probability = 0.1
) -> Partition:
    """A share of the samples IID, the others sorted by label: `share` 1 is IID, 0 gives each client
    a run of the sorted labels.

    floor(share n) random samples are dealt out evenly; the others, sorted by label, are cut into N
    consecutive runs and dealt to the clients at random. Sizes differ by at most one.

    Args:
        share: In [0, 1].

    Returns:
        The partition. Each sample has one client.

    Source: Hsu et al. 2019's measure as SCAFFOLD sets it (Karimireddy et al., ICML 2020, section
    7.1: 0, 10 and 100 %).
    """
    rng = partition_stream(labels, clients, seed)
    order = rng.permutation(len(labels))
    mixed = int(share * len(labels) + 1e-9)
    by_label = order[mixed:][np.argsort(labels[order[mixed:]], kind="stable")]
    sizes = equal_sizes(len(labels), clients)
    shared = equal_sizes(mixed, clients)
    seats = rng.permutation(clients)
    owners = np.concatenate(
        [np.repeat(np.arange(clients), shared), np.repeat(seats, (sizes - shared)[seats])]
    )
    return deal(np.concatenate([order[:mixed], by_label]), owners, clients, rng)
