"""Clients whose data are similar to a degree that one number sets."""

from __future__ import annotations

import numpy as np

from fedloom.config.fields import Probability
from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import deal, equal_sizes, require_clients
from fedloom.randomness import numpy_stream


@partitions.register("similarity")
def similarity(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, share: Probability = 0.1
) -> Partition:
    """A share of the samples IID, the others sorted by label: `share` 1 is IID, 0 gives each client a run of the sorted labels.

    floor(share n) random samples are dealt out evenly; the others, sorted by label, are cut into N consecutive runs and dealt to
    the clients at random. Sizes differ by at most one.

    Args:
        share: In [0, 1].

    Source: Hsu et al. 2019's measure as SCAFFOLD sets it (Karimireddy et al., ICML 2020, section 7.1: 0, 10 and 100 %).
    """
    require_clients(clients, len(labels))
    rng = numpy_stream(seed, "partition")
    order = rng.permutation(len(labels))
    mixed = int(share * len(labels) + 1e-9)
    by_label = order[mixed:][np.argsort(labels[order[mixed:]], kind="stable")]
    sizes = equal_sizes(len(labels), clients)
    shared = equal_sizes(mixed, clients)
    seats = rng.permutation(clients)
    owners = np.concatenate([np.repeat(np.arange(clients), shared), np.repeat(seats, (sizes - shared)[seats])])
    return deal(np.concatenate([order[:mixed], by_label]), owners, clients, rng)
