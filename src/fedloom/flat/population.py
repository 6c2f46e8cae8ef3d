"""A population is a matrix: the field's methods as plain maths on the rows of `[K, P]`, one row a
model.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat

import torch
from torch import Tensor

from fedloom.flat.layout import Unit

BLOCK = 1 << 22
"""Numbers of `[K, P]` per block of computations with intermediate results: little beside the
models, and within the caches.
"""


def weighted_mean(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean of rows: sum_k p_k rows[k] with p = weights / sum(weights).

    Args:
        rows: One tensor per client, `[K, ...]`. Means of whole numbers are in double precision.
        weights: Weight of each row, `[K]`, at least 0; without them all count alike.

    Returns:
        The mean, `[...]`.
    """
    if not rows.is_floating_point():
        rows = rows.double()
    share = rows.new_ones(len(rows)) if weights is None else weights.to(rows) / weights.sum()
    # faster than `rows.mean(0)`
    mean: Tensor = share @ (rows if rows.ndim < 3 else rows.flatten(1))
    return (mean if weights is not None else mean.div_(len(rows))).view(rows.shape[1:])


MEDIANS = 4
"""Times the median claim that one claim counts for at most (`capped`)."""


def capped(weights: Tensor, share: float) -> Tensor:
    """Lower claimed weights, so that few clients cannot take a mean by what they claim.

    A claim counts for at most `MEDIANS` times the (lower) median of those above 0, and for at most
    `share` of their sum: larger ones are lowered to one common value. Where even equal weights are
    above that share, all are equal. Of n claims f < n / 2 false ones then have at most 4 f / (3 f +
    floor(n / 2) + 1) of the sum, whatever the others are.

    Args:
        weights: Claims `[k]`, at least 0.
        share: Largest part of the sum, in (0, 1]. 1 believes all claims.

    Returns:
        Weights `[k]`: the claims themselves where nothing is lowered, else float64.
    """
    if share >= 1 or not bool((weights > 0).any()):
        return weights
    limit = MEDIANS * weights[weights > 0].median()
    if bool((weights > limit).any()):
        weights = weights.double().clamp(max=float(limit))
    falling = weights.double().sort(descending=True).values
    for count in range(len(falling)):
        if count * share >= 1:
            break
        # With the `count` largest at this value each has its share: share (count value + sum of the
        # others) = value.
        value = share * falling[count:].sum() / (1 - count * share)
        if falling[count] <= value:
            return weights if count == 0 else weights.double().clamp(max=value)
    return torch.ones_like(falling)


def recombine_(rows: Tensor, units: Sequence[Unit], generator: torch.Generator) -> Tensor:
    """Permute every unit over the models in place, as FedMR recombines them, at about the cost of
    copying the rows once.

    Each unit draws its own uniform permutation pi of {1..K}, and result[k, unit] = rows[pi(k),
    unit]. No number changes, and each unit of each model is used exactly once. Slices outside all
    units stay where they are.

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
            if rows.is_cuda:  # one launch for all rows instead of one each
                rows[:, columns] = rows[:, columns].index_select(0, source.to(rows.device))
                continue
            for cycle in cycles:
                spare = rows[cycle[0], columns].clone()
                for target, origin in pairwise(cycle):
                    rows[target, columns] = rows[origin, columns]
                rows[cycle[-1], columns] = spare
    return rows


def _cycles(source: list[int]) -> list[list[int]]:
    """Return the cycles of a permutation, each as [k, source[k], source[source[k]], ...], without
    those of length 1.
    """
    cycles, visited = [], [False] * len(source)
    for start in range(len(source)):
        cycle, k = [], start
        while not visited[k]:
            visited[k] = True
            cycle.append(k)
            k = source[k]
        if len(cycle) > 1:
            cycles.append(cycle)
    return cycles


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """Iterate over views of `[K, P]`, some columns of all rows at a time."""
    return iter(rows.split(max(1, BLOCK // max(1, len(rows))), 1))


def mean_cosine_similarity(rows: Tensor) -> Tensor:
    """Return the mean of cos(rows[i], rows[j]) over all pairs i < j, in [-1, 1]: how alike the
    models of a pool are.

    With u_k = rows[k] / |rows[k]| it is (|sum_k u_k|^2 - sum_k |u_k|^2) / (K (K - 1)): one pass
    instead of one for each pair. A single model has 1, and a zero row has similarity 0 to all
    others.

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
        since: Earlier models, `[K, P]`; the variance is then that of the differences from them.
    """
    spread = torch.zeros((), dtype=rows.dtype, device=rows.device)
    origins: Iterator[Tensor | None] = repeat(None) if since is None else _blocks(since)
    for block, origin in zip(_blocks(rows), origins, strict=False):
        difference = block if origin is None else block - origin
        spread += (difference - difference.mean(0)).square_().sum()
    return spread / len(rows)


def squared_distances(rows: Tensor) -> Tensor:
    """Return ||rows[i] - rows[j]||^2 as `[K, K]` for `rows [K, P]`, by differences, so that those
    of near models are exact.
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
    """Fill rows with mutants of a model, as FedMut does.

    For each tensor, half of the copies move by +1 times the direction and half by -1 + skew times
    it, drawn anew. With an odd count the last copy stays the center. With skew 0 the copies' mean
    is the center, up to rounding.

    Args:
        center: The model, `[P]`.
        direction: The direction of the moves, `[P]`.
        rows: Filled with the mutants, `[K, P]`.
        tensors: Slices that mutate; all other slices stay those of the center.
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
