"""Partitions with label skew.

Compares them with naive implementations and with their theoretical distributions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import numpy_stream
from fedloom.data.partition import Indices
from fedloom.data.partitions.class_prior import draw_classes, draw_turns
from fedloom.data.partitions.dirichlet import draw_counts
from partition_support import assert_each_sample_once, histogram_by_loops, make, some_labels

PROPERTIES = settings(max_examples=25, deadline=None)


# dirichlet


def naive_dirichlet_counts(
    sizes: list[int], clients: int, alpha: float, rng: np.random.Generator
) -> list[list[int]]:
    """Compute the definition in loops and lists from the same random numbers."""
    holdings: list[list[int]] = [[] for _ in range(clients)]
    for label, size in enumerate(sizes):
        takers = [i for i in range(clients) if len(holdings[i]) * clients < sum(sizes)]
        shares = rng.dirichlet([alpha] * len(takers)).tolist()
        begin, total = 0, 0.0
        for position, (i, share) in enumerate(zip(takers, shares, strict=True)):
            total += share
            end = size if position == len(takers) - 1 else math.floor(total * size)
            holdings[i] += [label] * (end - begin)
            begin = end
    return [[holding.count(label) for label in range(len(sizes))] for holding in holdings]


@PROPERTIES
@given(
    alpha=st.sampled_from([1e-9, 0.01, 0.1, 0.5, 5.0, 1e9]),
    clients=st.integers(1, 12),
    seed=st.integers(0, 999),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
def test_dirichlet_counts_equal_the_naive_cut(
    alpha: float, clients: int, seed: int, sizes: list[int]
) -> None:
    counts = draw_counts(np.array(sizes), clients, alpha, numpy_stream(seed, "partition"))
    assert counts.tolist() == naive_dirichlet_counts(
        sizes, clients, alpha, numpy_stream(seed, "partition")
    )
    assert counts.sum(axis=0).tolist() == sizes


def test_dirichlet_is_the_first_draw_that_reaches_the_minimum() -> None:
    labels = some_labels(1000, 5)
    sizes = np.bincount(labels).tolist()
    for seed in range(5):
        rng, draws = numpy_stream(seed, "partition"), 1
        counts = naive_dirichlet_counts(sizes, 10, 0.1, rng)
        while min(map(sum, counts)) < 20:
            counts, draws = naive_dirichlet_counts(sizes, 10, 0.1, rng), draws + 1
        partition = make("dirichlet", labels, 10, seed, alpha=0.1, minimum=20)
        assert histogram_by_loops(partition, labels, 5) == counts
        assert partition.sizes.min() >= 20
        assert_each_sample_once(partition, 1000)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 3.0])
def test_dirichlet_shares_have_the_analytic_mean_and_variance(alpha: float) -> None:
    """The share of client i in the first class is Beta(alpha, (N - 1) alpha)."""
    clients, repeats, size = 8, 4000, 10**9
    rng = np.random.default_rng(5)
    shares = (
        np.array([draw_counts(np.array([size]), clients, alpha, rng)[:, 0] for _ in range(repeats)])
        / size
    )
    law = stats.beta(alpha, (clients - 1) * alpha)
    assert np.abs(shares.mean(axis=0) - law.mean()).max() < 5 * law.std() / math.sqrt(repeats)
    fourth = law.expect(lambda x: (x - law.mean()) ** 4)
    tolerance = 5 * math.sqrt((fourth - law.var() ** 2) / repeats)
    assert np.abs(shares.var(axis=0) - law.var()).max() < tolerance
    # compare bins, because rounding to whole samples changes the smallest shares to 0
    edges = np.array([0, 1e-6, 1e-3, 0.01, 0.1, 0.4, 1])
    observed, expected = np.histogram(shares[:, 3], edges)[0], np.diff(law.cdf(edges)) * repeats
    observed, expected = observed[expected > 5], expected[expected > 5]
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4


def test_dirichlet_on_the_open_clients_is_the_renormalised_draw_over_all() -> None:
    """`draw_counts` has the same distribution as the literal rule for later classes.

    The literal rule draws for all clients, sets closed clients to zero and renormalises.
    """
    sizes, clients, alpha, repeats = np.array([4000, 4000, 4000]), 4, 0.5, 3000
    rng = np.random.default_rng(6)

    def literal() -> Indices:
        assigned = np.zeros(clients, dtype=np.int64)
        latest = assigned
        for size in sizes:
            shares = rng.dirichlet([alpha] * clients) * (assigned < sizes.sum() / clients)
            cuts = (np.cumsum(shares / shares.sum())[:-1] * size).astype(np.int64)
            latest = np.diff(np.concatenate([[0], cuts, [size]]))
            assigned = assigned + latest
        return latest

    expected = np.array([literal() for _ in range(repeats)])
    drawn = np.array([draw_counts(sizes, clients, alpha, rng)[:, 2] for _ in range(repeats)])
    assert stats.ks_2samp(expected[:, 1], drawn[:, 1]).pvalue > 1e-4
    assert stats.ks_2samp(expected.max(axis=1), drawn.max(axis=1)).pvalue > 1e-4


def test_dirichlet_that_cannot_reach_the_minimum_stops_and_names_the_smallest_client() -> None:
    with pytest.raises(
        InvalidValue,
        match=r"10000 draws the smallest client had at most 0 samples; use a smaller minimum",
    ):
        make("dirichlet", np.zeros(100, dtype=np.int64), 10, alpha=1e-9, minimum=5)


# class_prior


def naive_classes(priors: Any, turns: Indices, uniforms: Any, sizes: list[int]) -> list[int]:
    remaining, drawn = list(sizes), []
    for i, uniform in zip(turns.tolist(), uniforms.tolist(), strict=True):
        weights = [p if count else 0.0 for p, count in zip(priors[i], remaining, strict=True)]
        level, total, label = uniform * np.cumsum(weights)[-1], 0.0, 0
        for label, weight in enumerate(weights):  # noqa: B007 (the label reached is used after the loop)
            total += weight
            if total > level:
                break
        remaining[label] -= 1
        drawn.append(label)
    return drawn


@PROPERTIES
@given(
    alpha=st.sampled_from([0.05, 0.6, 20.0]),
    clients=st.integers(1, 8),
    seed=st.integers(0, 999),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    chunk=st.sampled_from([1, 50, 10**6]),
)
def test_class_prior_equals_the_sequential_process(
    alpha: float, clients: int, seed: int, sizes: list[int], chunk: int
) -> None:
    rng = np.random.default_rng(seed)
    priors = np.maximum(rng.dirichlet([alpha] * len(sizes), size=clients), 1e-200)
    turns = rng.integers(clients, size=sum(sizes))
    uniforms = rng.random(sum(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.data.partitions.class_prior._CELLS", chunk)
        drawn = draw_classes(priors, turns, uniforms, np.array(sizes))
    assert drawn.tolist() == naive_classes(priors, turns, uniforms, sizes)


def test_turns_go_to_a_random_client_among_those_with_room() -> None:
    """The probabilities of all orders of 2 + 1 turns match an enumeration.

    010 and 001 have probability 1/4 each, 100 has 1/2.
    """
    rng = np.random.default_rng(1)
    jobs = ["".join(map(str, draw_turns(np.array([2, 1]), rng))) for _ in range(4000)]
    counts = [jobs.count(job) for job in ("001", "010", "100")]
    assert sum(counts) == 4000
    assert stats.chisquare(counts, [1000, 1000, 2000]).pvalue > 1e-4


def test_class_prior_has_equal_sizes_and_shares_like_its_prior() -> None:
    """Clients have equal sizes, and the class shares have the mean and variance of Dir(0.6).

    Sampling adds variance. The result applies while samples of each class remain.
    """
    clients, classes, alpha = 400, 5, 0.6
    priors = np.random.default_rng(2).dirichlet([alpha] * classes, size=clients)
    turns = np.repeat(np.arange(clients), 200)
    uniforms = np.random.default_rng(3).random(len(turns))
    drawn = draw_classes(priors, turns, uniforms, np.full(classes, len(turns)))
    counts = np.bincount(turns * classes + drawn, minlength=clients * classes).reshape(
        clients, classes
    )
    expected = priors * 200
    spread = np.sqrt(np.maximum(200 * priors * (1 - priors), 1))
    assert (np.abs(counts - expected) / spread).max() < 6
    labels = some_labels(20_003, classes)
    partition = make("class_prior", labels, clients)
    assert set(partition.sizes.tolist()) == {50, 51}
    shares = partition.histogram(labels, classes) / partition.sizes[:, None]
    mean = 1 / classes
    variance = mean * (1 - mean) / (classes * alpha + 1)
    # variance of the prior and of 50 draws
    expected_variance = variance + (mean * (1 - mean) - variance) / 50
    assert shares.var(axis=0).mean() == pytest.approx(expected_variance, rel=0.12)


def test_class_prior_ends_when_a_prior_is_zero_on_all_remaining_classes() -> None:
    labels = some_labels(500, 10)
    assert_each_sample_once(make("class_prior", labels, 7, alpha=1e-9), 500)


# pathological and shards


@pytest.mark.parametrize(
    ("classes", "per_client", "clients"), [(10, 2, 20), (100, 10, 20), (10, 2, 50), (6, 3, 8)]
)
@pytest.mark.parametrize("balanced", [False, True])
def test_pathological_clients_form_groups_with_the_same_classes(
    classes: int, per_client: int, clients: int, balanced: bool
) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), 120))
    partition = make(
        "pathological", labels, clients, 3, classes_per_client=per_client, balanced=balanced
    )
    assert_each_sample_once(partition, len(labels))
    table = np.array(histogram_by_loops(partition, labels, classes))
    assert ((table > 0).sum(axis=1) == per_client).all()
    group = clients * per_client // classes
    for client, row in enumerate(table):
        lowest_class = client // group * per_client
        assert np.flatnonzero(row).tolist() == list(range(lowest_class, lowest_class + per_client))
    blocks = table.T[table.T > 0].reshape(classes, group)
    if balanced:
        assert np.ptp(blocks, axis=1).max() <= 1
    else:
        low = max(120 / group / 10, min(40, len(labels) / 2 / clients) / classes)
        assert blocks[:, :-1].min() >= low
        assert blocks[:, :-1].max() < max(120 / group, 2)
        assert len(set(blocks[:, 0].tolist())) > 1


@pytest.mark.parametrize(
    ("classes", "per_client", "clients"),
    [(10, 2, 10), (10, 3, 10), (10, 1, 25), (4, 4, 6), (6, 2, 3)],
)
def test_label_quantity_gives_every_client_its_number_of_classes_in_equal_parts(
    classes: int, per_client: int, clients: int
) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), 125))
    partition = make("label_quantity", labels, clients, 3, classes_per_client=per_client)
    table = np.array(histogram_by_loops(partition, labels, classes))
    assert ((table > 0).sum(axis=1) == per_client).all()
    assert all(table[client, client % classes] > 0 for client in range(clients))
    for column in table.T:
        holders = column[column > 0]
        assert holders.sum() in (0, 125)
        assert len(holders) == 0 or np.ptp(holders) <= 1
    assert len(set(partition.indices.tolist())) == len(partition.indices)


@pytest.mark.parametrize(
    ("classes", "per_client", "clients"), [(10, 2, 40), (10, 3, 40), (5, 1, 25), (6, 6, 8)]
)
def test_power_law_gives_consecutive_classes_with_unequal_sizes(
    classes: int, per_client: int, clients: int
) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), 400))
    partition = make(
        "power_law", labels, clients, 3, classes_per_client=per_client, least=4, sigma=2.0
    )
    assert_each_sample_once(partition, len(labels))
    table = np.array(histogram_by_loops(partition, labels, classes))
    for client, row in enumerate(table):
        expected = {(client + k) % classes for k in range(per_client)}
        assert set(np.flatnonzero(row).tolist()) == expected
    assert table[table > 0].min() >= 4
    assert table.max() > 5 * np.median(table[table > 0])


def test_power_law_without_deviation_is_balanced() -> None:
    labels = np.repeat(np.arange(5), 103)
    partition = make("power_law", labels, 10, 3, classes_per_client=2, least=5, sigma=0.0)
    table = np.array(histogram_by_loops(partition, labels, 5))
    for column in table.T:  # four clients share 103 samples; one of them gets the three left over
        assert sorted(column[column > 0].tolist()) == [25, 25, 25, 28]


def naive_pathological(
    sizes: list[int], clients: int, k: int, least: float, rng: np.random.Generator
) -> list[list[int]]:
    table = [[0] * len(sizes) for _ in range(clients)]
    for label, size in enumerate(sizes):
        with_quota = [i for i in range(clients) if sum(count > 0 for count in table[i]) < k]
        chosen = with_quota[: -(-clients * k // len(sizes))]
        for position, i in enumerate(chosen):
            rest_of_class = size - sum(row[label] for row in table)
            if position == len(chosen) - 1:
                table[i][label] = rest_of_class
            else:
                allowed = [
                    x
                    for x in range(size)
                    if max(size / len(chosen) / 10, least / len(sizes)) <= x < size / len(chosen)
                ]
                table[i][label] = int(rng.integers(allowed[0], allowed[-1] + 1))
    return table


@PROPERTIES
@given(
    clients=st.integers(1, 25), classes=st.integers(2, 9), data=st.data(), seed=st.integers(0, 99)
)
def test_pathological_equals_the_naive_loops(
    clients: int, classes: int, data: st.DataObject, seed: int
) -> None:
    k = data.draw(st.integers(1, classes))
    labels = np.concatenate([np.repeat(np.arange(classes), 60), some_labels(40, classes, seed)])
    partition = make("pathological", labels, clients, seed, classes_per_client=k)
    sizes = np.bincount(labels).tolist()
    least = min(40, len(labels) / (2 * clients))
    expected = naive_pathological(sizes, clients, k, least, numpy_stream(seed, "partition"))
    assert histogram_by_loops(partition, labels, classes) == expected
    assert len(set(partition.indices.tolist())) == len(partition.indices)


def test_pathological_leaves_out_classes_that_nobody_has_room_for() -> None:
    labels = some_labels(1000, 10)
    partition = make("pathological", labels, 3, classes_per_client=2)
    assert np.unique(labels[partition.indices]).tolist() == [0, 1, 2, 3, 4, 5]


def test_pathological_takes_one_sample_a_part_and_refuses_fewer() -> None:
    labels = np.repeat(np.arange(3), 4)
    assert (make("pathological", labels, 4, classes_per_client=3).histogram(labels, 3) == 1).all()
    with pytest.raises(
        InvalidValue, match=r"5 of 5 clients must share class number 0 with 4 samples"
    ):
        make("pathological", labels, 5, classes_per_client=3)


@PROPERTIES
@given(clients=st.integers(1, 20), per_client=st.integers(1, 4), seed=st.integers(0, 999))
def test_shards_are_runs_of_the_samples_sorted_by_label(
    clients: int, per_client: int, seed: int
) -> None:
    labels = some_labels(200, 5, seed)
    partition = make("shards", labels, clients, seed, per_client=per_client)
    shards = np.array_split(np.sort(labels), clients * per_client)
    assert_each_sample_once(partition, 200)
    assert np.ptp(partition.sizes) <= per_client
    # The shards with the most classes limit the number of classes of a client.
    widest = sorted((len(set(shard.tolist())) for shard in shards), reverse=True)[:per_client]
    assert max(len(set(labels[partition[client]].tolist())) for client in range(clients)) <= sum(
        widest
    )


def test_shards_of_mcmahan_give_at_most_two_classes_when_shards_end_with_classes() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 200))
    partition = make("shards", labels, 50)
    table = partition.histogram(labels, 10)
    assert (table.sum(axis=1) == 40).all()
    assert set(np.unique(table).tolist()) == {0, 20, 40}
    assert set((table > 0).sum(axis=1).tolist()) == {1, 2}
