"""Unbalanced clients with log-normal sizes and one distribution of labels."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import require_clients
from fedloom.randomness import numpy_stream

Spread = Annotated[float, Field(ge=0, le=100)]


@partitions.register("lognormal")
def lognormal(labels: Indices, clients: int, seed: int, groups: Indices | None, *, sigma: Spread = 0.3) -> Partition:
    """Unbalanced sizes, labels alike: n_i in proportion to LogNormal(ln(n / N), sigma); larger sigma, less balance.

    The draws are scaled to add up to n and rounded; every client has at least one sample.

    Args:
        sigma: The deviation of the logarithm, in [0, 100].

    Source: FedUmf appendix (unbalanced, 0.3), after FedDC (Gao et al., CVPR 2022), experimental setup.
    """
    require_clients(clients, len(labels))
    rng = numpy_stream(seed, "partition")
    # exp(ln(n / N) + sigma z) scaled to a given sum: the factor n / N cancels, and so does any other, such as the
    # largest draw, which keeps the exponential within double precision.
    exponents = sigma * rng.standard_normal(clients)
    sizes = apportion(np.exp(exponents - exponents.max()), len(labels))
    return Partition.from_sizes(rng.permutation(len(labels)), sizes)


def apportion(weights: npt.NDArray[np.float64], total: int) -> Indices:
    """Divide `total` into whole numbers in proportion to `weights >= 0` (not all 0), each at least 1, `[len(weights)]`.

    Shares below 1 become 1 and the others divide the remainder, until none is below; fractions are then rounded down, and the
    largest of them up until all add up to `total`.
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
