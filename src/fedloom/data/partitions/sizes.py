"""Quantity skew: clients of different sizes with one distribution of labels."""

import numpy as np
import numpy.typing as npt

from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import Concentration, Exponent, partition_stream


@partitions.register("lognormal")
def lognormal(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, sigma: Exponent = 0.3
) -> Partition:
    """Unbalanced sizes, labels alike: n_i in proportion to LogNormal(ln(n / N), sigma); larger
    sigma, less balance.

    The draws are scaled to add up to n and rounded; every client has at least one sample.

    Args:
        sigma: The deviation of the logarithm, in [0, 100].

    Returns:
        The partition. Each sample has one client.

    Source: FedUmf appendix (unbalanced, 0.3), after FedDC (Gao et al., CVPR 2022), experimental
    setup.
    """
    rng = partition_stream(labels, clients, seed)
    # exp(ln(n / N) + sigma z) scaled to a given sum: the factor n / N cancels, and so does any
    # other, such as the largest draw, which keeps the exponential within double precision.
    exponents = sigma * rng.standard_normal(clients)
    return _dealt(labels, np.exp(exponents - exponents.max()), rng)


@partitions.register("quantity")
def quantity(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, alpha: Concentration = 0.5
) -> Partition:
    """Quantity skew, labels alike: client i holds a share q_i of the samples, q ~ Dir(alpha);
    smaller alpha, less balance.

    Shares become whole numbers of samples that add up to n, at least one a client.

    Args:
        alpha: The concentration, greater than 0.

    Returns:
        The partition. Each sample has one client.

    Source: Li, Diao, Chen, He, Federated Learning on Non-IID Data Silos, ICDE 2022, section IV
    (quantity skew).
    """
    rng = partition_stream(labels, clients, seed)
    return _dealt(labels, rng.dirichlet(np.full(clients, alpha)), rng)


@partitions.register("exponential")
def exponential(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, rate: Exponent = 0.1
) -> Partition:
    """Sizes that grow exponentially, labels alike: n_i in proportion to exp(rate i), i = 1 .. N;
    `rate` 0 is IID.

    Client N holds exp(rate (N - 1)) times as much as client 1; every client has at least one
    sample.

    Args:
        rate: In [0, 100].

    Returns:
        The partition. Each sample has one client.

    Source: Flower's ExponentialPartitioner (rate 1), in flwr_datasets.
    """
    rng = partition_stream(labels, clients, seed)
    # exp(rate i) over exp(rate N), which double precision holds.
    return _dealt(labels, np.exp(rate * np.arange(1 - clients, 1)), rng)


@partitions.register("polynomial")
def polynomial(
    labels: Indices, clients: int, seed: int, groups: Indices | None, *, degree: Exponent = 1.0
) -> Partition:
    """Sizes that grow as a power, labels alike: n_i in proportion to i^degree, i = 1 .. N; `degree`
    0 is IID.

    Every client has at least one sample.

    Args:
        degree: In [0, 100].

    Returns:
        The partition. Each sample has one client.

    Source: Flower's LinearPartitioner (degree 1) and SquarePartitioner (degree 2), in
    flwr_datasets.
    """
    rng = partition_stream(labels, clients, seed)
    return _dealt(labels, (np.arange(1, clients + 1) / clients) ** degree, rng)


def _dealt(
    labels: Indices, weights: npt.NDArray[np.float64], rng: np.random.Generator
) -> Partition:
    # A Dirichlet vector may be all zeros but for one, and that one not finite, where alpha is tiny.
    return Partition.from_sizes(
        rng.permutation(len(labels)), apportion(np.nan_to_num(weights), len(labels))
    )


def apportion(weights: npt.NDArray[np.float64], total: int) -> Indices:
    """Divide a total into whole numbers of at least 1 in proportion to weights.

    Args:
        weights: Weights `[clients]`.
        total: The sum of the numbers.

    Returns:
        Numbers `[clients]`.
    """
    shares = np.ones(len(weights))
    free = np.ones(len(weights), dtype=bool)
    while free.any():
        shares[free] = weights[free] / weights[free].sum() * (total - (~free).sum())
        short = free & (shares < 1)
        if not short.any():
            break
        shares[short] = 1
        free &= ~short
    sizes = np.floor(shares).astype(np.int64)
    by_fraction = np.argsort(sizes - shares, kind="stable")
    sizes[by_fraction[: total - int(sizes.sum())]] += 1
    return sizes
