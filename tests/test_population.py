"""Population maths against plain loops, and the invariants of recombination."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.flat.population import (
    cosine_similarity,
    mean_cosine_similarity,
    recombine,
    recombine_,
    squared_distances,
    weighted_mean,
)

GENERATOR_SEEDS = st.integers(0, 2**31)


def rows_of(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def units_of(width: int, seed: int) -> list[tuple[slice, ...]]:
    """Random units: each a few disjoint slices; together they cover the row."""
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
    before = rows.clone()
    result = recombine(rows, units, torch.Generator().manual_seed(seed))
    assert torch.equal(rows, before)  # the input is left alone, and shares no memory with the result
    assert result.data_ptr() != rows.data_ptr()
    generator = torch.Generator().manual_seed(seed)
    for unit in units:
        source = torch.randperm(count, generator=generator).tolist()
        assert sorted(source) == list(range(count))
        for k in range(count):
            for part in unit:
                for column in range(part.start, part.stop):
                    assert result[k, column] == rows[source[k], column]
    assert torch.equal(recombine_(rows, units, torch.Generator().manual_seed(seed)), result)
    assert torch.equal(rows, result)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 30), GENERATOR_SEEDS)
def test_recombination_preserves_sums_and_squared_distances(count: int, width: int, seed: int) -> None:
    """Lemma 4.4, in exact arithmetic: math.fsum does not round on the way."""
    rows = rows_of(count, width, seed).double()
    result = recombine(rows, units_of(width, seed), torch.Generator().manual_seed(seed))
    anchor = rows_of(1, width, seed + 1)[0].double()
    for column in range(width):
        assert math.fsum(rows[:, column].tolist()) == math.fsum(result[:, column].tolist())
    before, after = ((block - anchor).square().reshape(-1).tolist() for block in (rows, result))
    assert math.fsum(before) == math.fsum(after)


def test_one_model_alone_is_left_as_it_is() -> None:
    rows = rows_of(1, 10, 0)
    assert torch.equal(recombine(rows, [(slice(0, 10),)], torch.Generator().manual_seed(3)), rows)


def test_permutations_are_uniform() -> None:
    """Where model 0's unit comes from, over 3,000 draws: chi-square with 3 degrees of freedom, 0.1 % level."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(4.0)[:, None].expand(4, 2).contiguous()
    counts = [[0] * 4 for _ in range(2)]
    for _ in range(3000):
        result = recombine(rows, [(slice(0, 1),), (slice(1, 2),)], generator)
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
        assert math.isclose(float(weighted_mean(rows, weights)[column]), expected, rel_tol=1e-6, abs_tol=1e-6)
        assert math.isclose(float(weighted_mean(rows)[column]), sum(values) / count, rel_tol=1e-9, abs_tol=1e-12)
    similarity, distance = cosine_similarity(rows), squared_distances(rows)
    pairs = []
    for i in range(count):
        for j in range(count):
            a, b = rows[i].tolist(), rows[j].tolist()
            dot = sum(x * y for x, y in zip(a, b, strict=True))
            cosine = dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))
            assert math.isclose(float(similarity[i, j]), cosine, abs_tol=1e-9)
            assert math.isclose(
                float(distance[i, j]), sum((x - y) ** 2 for x, y in zip(a, b, strict=True)), rel_tol=1e-9, abs_tol=1e-12
            )
            if i < j:
                pairs.append(cosine)
    assert math.isclose(float(mean_cosine_similarity(rows)), sum(pairs) / len(pairs) if pairs else 1.0, abs_tol=1e-9)


def test_a_zero_row_has_no_direction() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert torch.equal(cosine_similarity(rows)[0], torch.zeros(2))


def test_distances_of_near_models_do_not_cancel() -> None:
    rows = torch.full((2, 1000), 1000.0)
    rows[1, 0] += 0.5
    assert float(squared_distances(rows)[0, 1]) == 0.25
