"""Operations on populations of models: matrices `[K, P]` with one row per model."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat

import torch
from torch import Tensor

from fedloom.flat.layout import Unit

BLOCK = 1 << 22
"""Number of values of `[K, P]` in a block of computations with intermediate results.

A block is small compared with the models, and fits into the caches.
"""

CACHE_LINE = 64
"""Size of a cache line of the processor in bytes."""


def empty_rows(count: int, size: int, like: Tensor) -> Tensor:
    """Return uninitialised rows, `[count, size]`. Each row starts at a cache line.

    In rows without this alignment, the update of a layer takes 2.3 times as long (10 models
    784-200-200-10).

    Args:
        count: Number of rows.
        size: Number of values in a row.
        like: Tensor with the type and the device of the rows.
    """
    values = CACHE_LINE // like.element_size()
    return like.new_empty(count, -(-size // values) * values)[:, :size]


def weighted_mean(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean of rows: sum_k p_k rows[k] with p = weights / sum(weights).

    Args:
        rows: One tensor per client, `[K, ...]`. Means of integers are in double precision.
        weights: Weight of each row, `[K]`, at least 0. By default all weights are equal.

    Returns:
        The mean, `[...]`.
    """
    if not rows.is_floating_point():
        rows = rows.double()
    share = rows.new_ones(len(rows)) if weights is None else weights.to(rows) / weights.sum()
    # This product is faster than `rows.mean(0)`.
    mean: Tensor = share @ (rows if rows.ndim < 3 else rows.flatten(1))
    return (mean if weights is not None else mean.div_(len(rows))).view(rows.shape[1:])


def recombine_(rows: Tensor, units: Sequence[Unit], generator: torch.Generator) -> Tensor:
    """Permute every unit over the models in place, as in FedMR.

    Each unit gets an independent uniform permutation pi of {1..K}, and result[k, unit] =
    rows[pi(k), unit]. So each unit of each model is used exactly once. Slices outside all units
    stay unchanged. The cost is about one copy of the rows.

    Args:
        rows: The models, `[K, P]`.
        units: The units, from `Layout.units`.
        generator: Draws the permutations.

    Returns:
        `rows`.

    Source: FedMR (arXiv 2208.07677), section 4.
    """
    count = len(rows)
    for unit in units:
        source = torch.randperm(count, generator=generator)
        cycles = _cycles(source.tolist())
        for columns in unit:
            if rows.is_cuda:  # one kernel launch for all rows instead of one per row
                rows[:, columns] = rows[:, columns].index_select(0, source.to(rows.device))
                continue
            for cycle in cycles:
                first = rows[cycle[0], columns].clone()
                for target, origin in pairwise(cycle):
                    rows[target, columns] = rows[origin, columns]
                rows[cycle[-1], columns] = first
    return rows


def _cycles(source: list[int]) -> list[list[int]]:
    """Return the cycles of a permutation, [k, source[k], source[source[k]], ...].

    Cycles of length 1 are omitted.
    """
    cycles = []
    visited = [False] * len(source)
    for start in range(len(source)):
        cycle = []
        k = start
        while not visited[k]:
            visited[k] = True
            cycle.append(k)
            k = source[k]
        if len(cycle) > 1:
            cycles.append(cycle)
    return cycles


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """Iterate over blocks of columns of `[K, P]`, as views."""
    return iter(rows.split(max(1, BLOCK // max(1, len(rows))), 1))


def mean_cosine_similarity(rows: Tensor) -> Tensor:
    """Return the mean cosine similarity of all pairs of models, in [-1, 1].

    With u_k = rows[k] / |rows[k]| it is (|sum_k u_k|^2 - sum_k |u_k|^2) / (K (K - 1)), so that one
    pass over the rows is enough. A single model has the value 1. A zero row has similarity 0 to all
    other rows.

    Args:
        rows: The models, `[K, P]`.

    Source: FedMR (arXiv 2208.07677), figure 5.
    """
    count = len(rows)
    if count == 1:
        return torch.ones((), dtype=rows.dtype, device=rows.device)
    norms = rows.norm(dim=1)
    scale = 1 / norms.clamp_min(torch.finfo(rows.dtype).tiny)
    total = (scale @ rows).double()
    squares = (scale * norms).double().square().sum()
    mean: Tensor = (total @ total - squares) / (count * (count - 1))
    return mean.clamp(-1, 1).to(rows.dtype)


def total_variance(rows: Tensor, since: Tensor | None = None) -> Tensor:
    """Return the mean squared distance of models from their mean, (1/K) sum_k |rows[k] - mean|^2.

    Args:
        rows: The models, `[K, P]`.
        since: Earlier models, `[K, P]`. With them, the function returns the variance of the
            differences between both.

    Returns:
        The variance summed over the P coordinates, a scalar of the type of `rows`.
    """
    spread = torch.zeros((), dtype=rows.dtype, device=rows.device)
    origins: Iterator[Tensor | None] = repeat(None) if since is None else _blocks(since)
    for block, origin in zip(_blocks(rows), origins, strict=False):
        difference = block if origin is None else block - origin
        spread += (difference - difference.mean(0)).square_().sum()
    return spread / len(rows)


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared distances of all pairs of `rows [K, P]`, `[K, K]`.

    They are computed from differences, so that they are exact for similar models.
    """
    count = len(rows)
    result = torch.zeros(count, count, dtype=rows.dtype, device=rows.device)
    for block in _blocks(rows):
        for i in range(count - 1):
            result[i, i + 1 :] += (block[i + 1 :] - block[i]).square_().sum(1)
    return result + result.T


def mutate(
    center: Tensor,
    direction: Tensor,
    rows: Tensor,
    tensors: Sequence[slice],
    skew: float,
    generator: torch.Generator,
) -> Tensor:
    """Fill rows with mutants of a model, as in FedMut.

    In each tensor, a random half of the copies moves by +1 times the direction, and the other half
    by -1 + skew times the direction. With an odd number of copies, the last copy is the center.
    With skew 0, the mean of the copies is the center, up to rounding.

    Args:
        center: The model, `[P]`.
        direction: The direction of the changes, `[P]`.
        rows: Filled with the mutants, `[K, P]`.
        tensors: Slices that mutate. All other slices equal the center.
        skew: Added to the negative factor.
        generator: Draws the factors.

    Returns:
        `rows`.

    Source: Hu et al. 2024 (FedMut), algorithm 1.
    """
    rows.copy_(center)
    paired = len(rows) - len(rows) % 2
    signs = torch.tensor([1.0, skew - 1.0], dtype=center.dtype).repeat(paired // 2)
    for columns in tensors:
        sign = signs[torch.randperm(paired, generator=generator)].to(center.device)
        rows[:paired, columns].addcmul_(sign.unsqueeze(1), direction[columns])
    return rows
