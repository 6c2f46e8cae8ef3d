"""Label skew: every class is spread over the clients by a Dirichlet distribution."""

import numpy as np
import numpy.typing as npt

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count
from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import (
    Concentration,
    class_sizes,
    cut_classes,
    partition_stream,
)

_MOST_DRAWS = 10_000
_MOST_SHARES = 200_000_000  # Dirichlet shares over all draws: some seconds


@partitions.register("dirichlet")
def dirichlet(
    labels: Indices,
    clients: int,
    seed: int,
    groups: Indices | None,
    *,
    alpha: Concentration = 0.5,
    minimum: Count = 10,
) -> Partition:
    """Label skew over clients: each class is shared out by Dir(alpha); smaller alpha, stronger
    skew.

    Class after class: q ~ Dir(alpha 1) over the clients, q_i = 0 for those that hold n / clients
    samples or more, q <- q / sum(q); client i gets the samples from floor(n_c sum_{j<i} q_j) to
    floor(n_c sum_{j<=i} q_j).

    Args:
        alpha: The concentration, greater than 0.
        minimum: All is drawn anew until every client has this number of samples (FedMR: 10;
            FedALA: 40, from min(4 B, n / (2 N))); at most 10,000 times, fewer where clients x
            classes is large.

    Returns:
        The partition. Each sample has one client.

    Raises:
        InvalidValue: For clients * minimum > n, or if no draw reaches `minimum`.

    Source: Hsu, Qi, Brown, arXiv 1909.06335; FedMR (arXiv 2305.10730) section 5.1; FedALA (AAAI
    2023) section 5.1.
    """
    rng = partition_stream(labels, clients, seed, minimum=minimum)
    sizes = class_sizes(labels)
    draws = int(np.clip(_MOST_SHARES // (clients * len(sizes)), 5, _MOST_DRAWS))
    best = 0
    for _ in range(draws):
        counts = draw_counts(sizes, clients, alpha, rng)
        smallest = int(counts.sum(axis=1).min())
        if smallest >= minimum:
            return cut_classes(labels, counts, rng)
        best = max(best, smallest)
    raise InvalidValue(
        f"dirichlet(alpha={alpha}, minimum={minimum}) over {clients} clients: in {draws} draws "
        "the smallest client had "
        f"at most {best} samples; use a smaller minimum, a larger alpha or fewer clients"
    )


def draw_counts(
    sizes: Indices, clients: int, alpha: float, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw the number of samples of each client and class once.

    Args:
        sizes: Samples of each class, `[classes]`.
        clients: Number of clients.
        alpha: Concentration.
        rng: Source of the draws.

    Returns:
        `[clients, classes]`.
    """
    fair = sizes.sum() / clients
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    totals = np.zeros(clients, dtype=np.int64)
    for label, size in enumerate(sizes):
        # A Dirichlet vector renormalised over some clients is itself Dirichlet over these. Drawing
        # that at once cannot divide by a sum that is zero in double precision, as it may be with a
        # small alpha.
        open_clients = np.flatnonzero(totals < fair)
        shares = rng.dirichlet(np.full(len(open_clients), alpha))
        cuts = np.floor(np.cumsum(shares[:-1]) * size).astype(np.int64)
        counts[open_clients, label] = np.diff(np.minimum(cuts, size), prepend=0, append=size)
        totals += counts[:, label]
    return counts
