"""A population is a matrix: the field's methods as plain maths on the rows of `[K, P]`, one row a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat

import torch
from torch import Tensor

from fedloom.flat.layout import Unit

BLOCK = 1 << 22
"""Numbers of `[K, P]` that work with intermediate results takes at a time: little beside the models, and in the caches."""


def weighted_mean(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum_k p_k rows[k] with p = weights / sum(weights), or the plain mean; `[K, ...]` and `[K]` to `[...]`. Means
    of whole numbers are in double precision."""
    if not rows.is_floating_point():
        rows = rows.double()
    if weights is None:
        return rows.mean(0)
    share: Tensor = weights.to(rows) / weights.sum()
    mean: Tensor = share @ (rows if rows.ndim < 3 else rows.flatten(1))
    return mean.view(rows.shape[1:])


def capped(weights: Tensor, share: float) -> Tensor:
    """Weights `[k]` of which none is more than `share` of their sum: those above are lowered to one common value. Where
    even equal weights are above it, all are equal."""
    falling = weights.double().sort(descending=True).values
    for count in range(len(falling)):
        if count * share >= 1:
            break
        # With the `count` largest at this value each has its share: share (count value + sum of the others) = value.
        value = share * falling[count:].sum() / (1 - count * share)
        if falling[count] <= value:
            return weights if count == 0 else weights.double().clamp(max=value)
    return torch.ones_like(falling)


def recombine(rows: Tensor, units: Sequence[Unit], generator: torch.Generator) -> Tensor:
    """FedMR's model recombination (arXiv 2208.07677, section 4): every unit of `[K, P]` is permuted over the models.

    For each unit an independent uniform permutation pi of {1..K} is drawn, and result[k, unit] = rows[pi(k), unit]. A pure
    permutation: no float is touched, each unit of each model is used exactly once. Slices outside all units stay in place.
    """
    return recombine_(rows.clone(), units, generator)


def recombine_(rows: Tensor, units: Sequence[Unit], generator: torch.Generator) -> Tensor:
    """`recombine` in place: the same numbers with one spare slice of memory, at about the cost of copying the rows once."""
    count = len(rows)
    for unit in units:
        source = torch.randperm(count, generator=generator)
        cycles = _cycles(source.tolist())
        for part in unit:
            if rows.is_cuda:  # one launch for all rows instead of one each
                rows[:, part] = rows[:, part].index_select(0, source.to(rows.device))
                continue
            for cycle in cycles:
                spare = rows[cycle[0], part].clone()
                for target, origin in pairwise(cycle):
                    rows[target, part] = rows[origin, part]
                rows[cycle[-1], part] = spare
    return rows


def _cycles(source: list[int]) -> list[list[int]]:
    """The cycles of a permutation, each as [k, source[k], source[source[k]], ...]; those of length 1 are left out."""
    cycles, seen = [], [False] * len(source)
    for start in range(len(source)):
        cycle, k = [], start
        while not seen[k]:
            seen[k] = True
            cycle.append(k)
            k = source[k]
        if len(cycle) > 1:
            cycles.append(cycle)
    return cycles


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """Views of `[K, P]`, some columns of all rows at a time."""
    return iter(rows.split(max(1, BLOCK // max(1, len(rows))), 1))


def mean_cosine_similarity(rows: Tensor) -> Tensor:
    """Mean of cos(rows[i], rows[j]) over all pairs i < j of `[K, P]`: how alike the models of a pool are (FedMR, figure 5). One
    model alone counts as 1, and a zero row has similarity 0 to all others.

    With u_k = rows[k] / |rows[k]| it is (|sum_k u_k|^2 - sum_k |u_k|^2) / (K (K - 1)): one pass instead of one for each pair.
    """
    count = len(rows)
    if count == 1:
        return torch.ones((), dtype=rows.dtype, device=rows.device)
    norms = rows.norm(dim=1)
    scale = 1 / norms.clamp_min(torch.finfo(rows.dtype).tiny)
    total = (scale @ rows).double()
    own = (scale * norms).double().square().sum()
    mean: Tensor = (total @ total - own) / (count * (count - 1))
    return mean.clamp(-1, 1).to(rows.dtype)


def total_variance(rows: Tensor, since: Tensor | None = None) -> Tensor:
    """(1/K) sum_k |rows[k] - mean|^2 of `[K, P]`: the mean squared distance of the models from their mean; with `since [K, P]`,
    of what each has gained since it was that."""
    spread = torch.zeros((), dtype=rows.dtype, device=rows.device)
    earlier: Iterator[Tensor | None] = repeat(None) if since is None else _blocks(since)
    for block, before in zip(_blocks(rows), earlier, strict=False):
        gained = block if before is None else block - before
        spread += (gained - gained.mean(0)).square_().sum()
    return spread / len(rows)


def squared_distances(rows: Tensor) -> Tensor:
    """||rows[i] - rows[j]||^2, `[K, P]` to `[K, K]`, each difference taken before squaring, so that near models come out
    exact where the expanded form would cancel."""
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
    """FedMut's mutation: fills `rows [K, P]` with copies of `center [P]`, tensor by tensor moved by `direction [P]` times a sign.

    For each tensor, each two copies draw one +1 and one -1 + skew, and which copy gets which is drawn anew; with K odd the last
    copy stays `center`. With skew 0 the copies' mean is `center` up to rounding. Slices outside `tensors` stay.
    """
    rows.copy_(center)
    paired = len(rows) - len(rows) % 2
    signs = torch.tensor([1.0, skew - 1.0], dtype=center.dtype).repeat(paired // 2)
    for part in tensors:
        sign = signs[torch.randperm(paired, generator=generator)].to(center.device)
        rows[:paired, part].addcmul_(sign.unsqueeze(1), direction[part])
    return rows
