"""Held-out samples: the test split of a set that has none."""

import math

import torch
from torch import Tensor

from fedloom.data.dataset import Samples
from fedloom.errors import InvalidValue
from fedloom.randomness import stream


def hold_out(samples: Samples, fraction: float, seed: int, *, within: Tensor | None = None) -> tuple[Samples, Samples]:
    """Split samples at random into (training, test), the same share of each group of `within [n]`, by default of each class."""
    if not 0 < fraction < 1:
        raise InvalidValue(f"test_fraction must lie between 0 and 1, not {fraction}")
    total = len(samples)
    if within is None:
        classes = samples.labels.dtype == torch.int64 and samples.labels.dim() == 1
        within = samples.labels if classes else torch.zeros(total)
    groups = torch.unique(within, return_inverse=True)[1]
    shuffled = torch.randperm(total, generator=stream(seed, "hold out"))
    order = shuffled[groups[shuffled].argsort(stable=True)]
    sizes = torch.bincount(groups)
    # The small addition keeps a product such as 0.29 * 100 = 28.999999999999996 from losing a sample.
    trained = [max(1, math.floor((1 - fraction) * size + 1e-9)) for size in sizes.tolist()]
    rank = torch.arange(total) - (sizes.cumsum(0) - sizes)[groups[order]]
    training = torch.empty(total, dtype=torch.bool)
    training[order] = rank < torch.tensor(trained, dtype=torch.long)[groups[order]]
    return samples[training], samples[~training]
