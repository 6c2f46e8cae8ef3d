"""Clients that the data or a file name: writers and users, and a partition that was saved."""

import numpy as np

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, require_at_least
from fedloom.common.randomness import numpy_stream
from fedloom.data.partition import Indices, Partition, partitions, require_samples
from fedloom.data.partitions.classes import deal


@partitions.register("natural")
def natural(
    labels: Indices,
    clients: int,
    seed: int,
    groups: Indices | None,
    *,
    minimum: Count = 1,
    together: Count = 1,
) -> Partition:
    """Clients as they are: one for each writer or user with at least `minimum` samples, or for
    `together` of these at random.

    `clients` = 0 takes them all, otherwise that many at random; they keep the order of their
    numbers.

    Args:
        minimum: Writers with fewer samples are left out.
        together: The writers of a client; those that make no whole client join the one with the
            highest number.

    Returns:
        The partition. Samples of groups that are left out are in no part.

    Raises:
        InvalidValue: For data without groups, or more clients than there are with `minimum`
            samples.

    Source: LEAF (Caldas et al., arXiv 1812.01097); FedMR (arXiv 2305.10730) section 5.1: FEMNIST,
    100 samples or more; `together` as Flower's GroupedNaturalIdPartitioner.
    """
    if groups is None:
        raise InvalidValue(
            "partition 'natural' needs data with the client of each sample (such as FEMNIST)"
        )
    require_at_least("clients", clients, 0)
    _, members, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    able = np.flatnonzero(sizes >= minimum)
    possible = len(able) // together
    if possible < max(clients, 1):
        size = "" if together == 1 else f", and a client is {together} of them"
        raise InvalidValue(
            f"clients is {max(clients, 1)}, "
            f"but {len(able)} of the {len(sizes)} natural ones have at least {minimum} "
            f"samples{size}"
        )
    rng = numpy_stream(seed, "partition")
    mixed = rng.permutation(able) if together > 1 else able
    chosen = np.arange(possible)
    if clients:
        chosen = np.sort(rng.choice(possible, clients, replace=False))
    # those that make no whole client join the last one
    team = np.minimum(np.arange(len(able)) // together, possible - 1)
    owners = np.full(len(sizes), -1)
    owners[mixed] = np.where(np.isin(team, chosen), np.searchsorted(chosen, team), -1)
    return deal(np.arange(len(labels)), owners[members], len(chosen), rng)


@partitions.register("fixed")
def fixed(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, file: str = "split.npz"
) -> Partition:
    """The partition in `file`, as `Partition.save` wrote it, whatever the seed; the file's number
    of clients, or 0.

    Args:
        file: The path of the npz file.

    Returns:
        The partition of the file.

    Raises:
        DataError: For a file that is missing, damaged or of other data (a sample that does not
            exist or has two clients).
        InvalidValue: For another number of clients.
    """
    partition = Partition.load(file)
    if clients not in (0, len(partition)):
        raise InvalidValue(
            f"clients must be {len(partition)}, the number in {file}, or 0, not {clients}"
        )
    require_samples(partition, len(labels), file)
    return partition
