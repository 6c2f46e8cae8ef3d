"""Epsilon of differential privacy after a number of releases with Gaussian noise, computed by
Google's dp-accounting.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from fedloom.common.errors import FedloomError, InvalidValue, installing

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
"""Orders of Renyi divergence. Integer orders have a closed form; the smallest epsilon over all
orders is valid.
"""

LEAST_NOISE = 1e-100
"""Smaller noise counts as no noise, since its square would be 0."""


@cache
def epsilon(noise: float, share: float, releases: int, delta: float, earlier: float = 0.0) -> float:
    """Return the epsilon of (epsilon, `delta`)-privacy for adding or removing one client; infinity
    without noise.

    Args:
        noise: Standard deviation of the noise, as a multiple of the largest contribution of a
            client to a sum.
        share: Probability with which each client independently takes part in a release.
        releases: Number of noisy sums.
        delta: Probability of a larger loss.
        earlier: Sum of 1 / noise^2 over earlier releases with all clients.

    Returns:
        Epsilon, at least 0. It is an upper bound.

    Raises:
        FedloomError: If dp-accounting is not installed.

    Source: Mironov et al. 2019, Renyi divergences; Canonne et al. 2020, their conversion.
    """
    if releases == 0 and earlier == 0:
        return 0.0
    if releases and noise < LEAST_NOISE:
        return math.inf
    accountant = _library().rdp.rdp_privacy_accountant
    divergences = earlier / 2 * np.array(ORDERS) + (
        releases * _divergences(noise, share) if releases else 0
    )
    return float(accountant.compute_epsilon(ORDERS, divergences, delta)[0])


@cache
def noise_for(target: float, share: float, releases: int, delta: float) -> float:
    """Return the smallest noise with an epsilon of at most `target`, with a relative precision of
    1e-4.

    Args:
        target: Largest epsilon.
        share: Probability with which each client independently takes part in a release.
        releases: Number of noisy sums.
        delta: Probability of a larger loss.

    Returns:
        Standard deviation of the noise, as a multiple of the largest contribution of a client.

    Raises:
        InvalidValue: Noise of 1e6 is not enough.
    """
    low = 0.0
    high = 1.0
    while epsilon(high, share, releases, delta) > target:
        low = high
        high = 2 * high
        if high > 1e6:
            raise InvalidValue(
                f"target_epsilon={target:g} cannot be reached with {releases} releases at "
                f"delta={delta:g}. Raise it or delta"
            )
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if epsilon(middle, share, releases, delta) > target else (low, middle)
        )
    return high


@cache
def _divergences(noise: float, share: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Renyi divergence of one release at each of `ORDERS`. The divergences of several releases are
    added.
    """
    library = _library()
    event = library.PoissonSampledDpEvent(share, library.GaussianDpEvent(noise))
    return np.array(library.rdp.RdpAccountant(ORDERS).compose(event)._rdp)


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise FedloomError(
            f"privacy accounting needs 'dp-accounting': {installing('privacy')}"
        ) from None
    return dp_accounting
