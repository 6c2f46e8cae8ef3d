"""Computations on model pools compared with plain loops, and invariants of recombination."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.flat.population import (
    CACHE_LINE,
    empty_rows,
    mean_cosine_similarity,
    recombine_,
    squared_distances,
    weighted_mean,
)

GENERATOR_SEEDS = st.integers(0, 2**31)


def rows_of(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def units_of(width: int, seed: int) -> list[tuple[slice, ...]]:
    """Draw random units of a few disjoint slices that together cover the row."""
    generator = torch.Generator().manual_seed(seed)
    cuts = sorted({0, width, *torch.randint(0, width + 1, (5,), generator=generator).tolist()})
    pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    units: list[list[slice]] = [[], [], []]
    for piece in pieces:
        units[int(torch.randint(3, (), generator=generator))].append(piece)
    return [tuple(unit) for unit in units if unit]


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 9), st.integers(1, 40), GENERATOR_SEEDS)
def test_recombination_is_one_permutation_a_unit(count: int, width: int, seed: int) -> None:
    rows = rows_of(count, width, seed)
    units = units_of(width, seed)
    original = rows.clone()
    result = recombine_(rows.clone(), units, torch.Generator().manual_seed(seed))
    # the input is unchanged and does not share memory with the result
    assert torch.equal(rows, original)
    assert result.data_ptr() != rows.data_ptr()
    generator = torch.Generator().manual_seed(seed)
    for unit in units:
        source = torch.randperm(count, generator=generator).tolist()
        assert sorted(source) == list(range(count))
        for k in range(count):
            for columns in unit:
                for column in range(columns.start, columns.stop):
                    assert result[k, column] == rows[source[k], column]
    assert torch.equal(recombine_(rows, units, torch.Generator().manual_seed(seed)), result)
    assert torch.equal(rows, result)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 30), GENERATOR_SEEDS)
def test_recombination_preserves_sums_and_squared_distances(
    count: int, width: int, seed: int
) -> None:
    """Lemma 4.4 holds in exact arithmetic, because math.fsum has no intermediate rounding."""
    rows = rows_of(count, width, seed).double()
    result = recombine_(rows.clone(), units_of(width, seed), torch.Generator().manual_seed(seed))
    anchor = rows_of(1, width, seed + 1)[0].double()
    for column in range(width):
        assert math.fsum(rows[:, column].tolist()) == math.fsum(result[:, column].tolist())
    distances, distances_after = (
        (block - anchor).square().reshape(-1).tolist() for block in (rows, result)
    )
    assert math.fsum(distances) == math.fsum(distances_after)


def test_a_pool_of_one_model_is_unchanged() -> None:
    rows = rows_of(1, 10, 0)
    assert torch.equal(
        recombine_(rows.clone(), [(slice(0, 10),)], torch.Generator().manual_seed(3)), rows
    )


def test_permutations_are_uniform() -> None:
    """The source of model 0's unit is uniform over 3,000 draws.

    Chi-square test with 3 degrees of freedom at the 0.1 % level.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(4.0)[:, None].expand(4, 2).contiguous()
    counts = [[0] * 4 for _ in range(2)]
    for _ in range(3000):
        result = recombine_(rows.clone(), [(slice(0, 1),), (slice(1, 2),)], generator)
        for unit in range(2):
            counts[unit][int(result[0, unit])] += 1
    for unit in range(2):
        assert sum((count - 750) ** 2 / 750 for count in counts[unit]) < 16.27


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 20), GENERATOR_SEEDS)
def test_means_and_distances_equal_plain_loops(count: int, width: int, seed: int) -> None:
    rows = rows_of(count, width, seed).double()
    weights = torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.1
    total = float(weights.double().sum())
    for column in range(width):
        values = [float(rows[k, column]) for k in range(count)]
        expected = sum(float(weights[k]) * values[k] for k in range(count)) / total
        assert math.isclose(
            float(weighted_mean(rows, weights)[column]), expected, rel_tol=1e-6, abs_tol=1e-6
        )
        assert math.isclose(
            float(weighted_mean(rows)[column]), sum(values) / count, rel_tol=1e-9, abs_tol=1e-12
        )
    distance = squared_distances(rows)
    for i in range(count):
        for j in range(count):
            expected = sum(
                (x - y) ** 2 for x, y in zip(rows[i].tolist(), rows[j].tolist(), strict=True)
            )
            assert math.isclose(float(distance[i, j]), expected, rel_tol=1e-9, abs_tol=1e-12)


def mean_of_pairs(rows: torch.Tensor) -> float:
    """Return the mean cosine over all pairs. A single row counts as 1."""
    cosines = []
    for a, b in itertools.combinations(rows.double().tolist(), 2):
        lengths = math.hypot(*a) * math.hypot(*b)
        cosines.append(
            math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0
        )
    return math.fsum(cosines) / len(cosines) if cosines else 1.0


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 12),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.1, 1.0, 100.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    GENERATOR_SEEDS,
)
def test_the_mean_cosine_in_one_pass_equals_all_pairs(
    count: int, width: int, alike: float, with_zeros: bool, dtype: torch.dtype, seed: int
) -> None:
    rows = rows_of(count, width + 3, seed).to(dtype) + alike * rows_of(1, width + 3, seed + 1).to(
        dtype
    )
    if with_zeros:
        rows[::3] = 0
    rows = rows[:, :width]  # the width of the trainable parameters in longer rows
    cosine = mean_cosine_similarity(rows)
    assert cosine.dtype == dtype
    assert -1 <= float(cosine) <= 1
    assert math.isclose(
        float(cosine), mean_of_pairs(rows), abs_tol=1e-6 if dtype == torch.float32 else 1e-12
    )


def test_a_pool_of_equal_and_one_of_opposite_models() -> None:
    row = rows_of(1, 1000, 3)
    assert float(mean_cosine_similarity(row.repeat(50, 1))) == pytest.approx(1, abs=1e-6)
    assert float(mean_cosine_similarity(torch.cat([row, -row]))) == pytest.approx(-1, abs=1e-6)
    assert float(mean_cosine_similarity(torch.cat([row, torch.zeros_like(row)]))) == pytest.approx(
        0, abs=1e-6
    )


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest new tensor."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:
            self.numbers = max(self.numbers, result.numel())
        return result


def test_the_mean_cosine_copies_no_pool() -> None:
    rows = rows_of(50, 1003, 0)[:, :1000]
    with Largest() as largest:
        mean_cosine_similarity(rows)
    assert largest.numbers == 1000  # one model


def test_distances_of_near_models_do_not_cancel() -> None:
    rows = torch.full((2, 1000), 1000.0)
    rows[1, 0] += 0.5
    assert float(squared_distances(rows)[0, 1]) == 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 16, 17, 1000])
def test_rows_begin_at_lines_of_the_caches(size: int, dtype: torch.dtype) -> None:
    rows = empty_rows(5, size, torch.zeros(1, dtype=dtype))
    assert rows.shape == (5, size)
    assert rows.dtype == dtype
    assert [row.data_ptr() % CACHE_LINE for row in rows] == [0] * 5
    rows.copy_(torch.arange(5 * size).view(5, size) % 7)
    assert rows.flatten().tolist() == [value % 7 for value in range(5 * size)]
