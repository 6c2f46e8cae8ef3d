"""Partitions: common properties, equal label distributions and natural clients."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.common.errors import InvalidValue, UnknownName
from fedloom.data.partition import partitions
from fedloom.data.partitions.sizes import apportion
from partition_support import assert_each_sample_once, histogram_by_loops, make, some_labels

PROPERTIES = settings(max_examples=25, deadline=None)
OPTIONS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 1.0, "minimum": 1},
    "class_prior": {},
    "lognormal": {},
    "pathological": {},
    "label_quantity": {},
    "power_law": {},
    "shards": {},
    "natural": {},
    "quantity": {},
    "exponential": {},
    "polynomial": {},
    "similarity": {},
}


# All partitions


def test_all_partitions_are_registered_with_a_summary() -> None:
    entries = {entry.name: entry for entry in partitions}
    assert set(entries) == {*OPTIONS, "fixed"}
    assert all(entry.summary.endswith(".") for entry in entries.values())
    assert set(entries["dirichlet"].parameters) == {"alpha", "minimum"}
    with pytest.raises(UnknownName, match="did you mean 'dirichlet'"):
        partitions["dirichlett"]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_partition_is_a_pure_function_of_the_seed(name: str) -> None:
    labels = some_labels(600, 6)
    groups = some_labels(600, 12, seed=1)
    partition, repeated, other_seed = (
        make(name, labels, 12, seed, groups, **OPTIONS[name]) for seed in (3, 3, 4)
    )
    assert np.array_equal(partition.indices, repeated.indices)
    assert np.array_equal(partition.offsets, repeated.offsets)
    assert not np.array_equal(partition.indices, other_seed.indices)
    assert partition.indices.dtype == partition.offsets.dtype == np.int64
    assert len(partition) == 12


@PROPERTIES
@given(
    name=st.sampled_from(
        sorted(set(OPTIONS) - {"natural", "pathological", "label_quantity", "power_law"})
    ),
    clients=st.integers(1, 12),
    samples=st.integers(150, 300),
    classes=st.integers(1, 7),
    seed=st.integers(0, 2**40),
)
def test_every_sample_has_exactly_one_client_and_every_client_a_sample(
    name: str, clients: int, samples: int, classes: int, seed: int
) -> None:
    partition = make(
        name, some_labels(samples, classes, seed % 97) * 3 + 1, clients, seed, **OPTIONS[name]
    )
    assert_each_sample_once(partition, samples)
    assert len(partition) == clients
    assert partition.sizes.min() >= 1


@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_samples_of_a_client_are_a_fair_sample(name: str) -> None:
    """With sorted data, the first half of each client has half of the low numbers."""
    labels = np.sort(some_labels(4000, 4))
    partition = make(name, labels, 4, 1, some_labels(4000, 4, seed=2), **OPTIONS[name])
    halves = [partition[client][: len(partition[client]) // 2] for client in range(4)]
    low = sum(
        int((half < np.median(partition[client])).sum()) for client, half in enumerate(halves)
    )
    assert abs(low / sum(map(len, halves)) - 0.5) < 0.06


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"natural"}))
def test_too_few_samples_or_clients_are_refused_in_one_line(name: str) -> None:
    for clients in (0, -3, 41):
        with pytest.raises(
            InvalidValue, match=rf"(must be at least 1, not {clients}$)|(^41 clients.*there are 40)"
        ) as info:
            make(name, some_labels(40, 2), clients, **OPTIONS[name])
        assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("dirichlet", {"alpha": 0.0}, "alpha must be between 1e-09 and 1e\\+09, not 0.0"),
        ("dirichlet", {"alpha": -1.0}, "alpha must be between 1e-09"),
        ("dirichlet", {"alpha": math.nan}, "alpha must be between 1e-09"),
        ("dirichlet", {"alpha": math.inf}, "alpha must be between 1e-09"),
        ("dirichlet", {"minimum": 0}, "minimum must be at least 1, not 0"),
        (
            "dirichlet",
            {"minimum": 21},
            "10 clients with at least 21 .* need 210, but there are 200: at most 9 clients",
        ),
        ("class_prior", {"alpha": 0.0}, "alpha must be between 1e-09"),
        ("lognormal", {"sigma": -0.1}, "sigma must be between 0 and 100, not -0.1"),
        ("lognormal", {"sigma": math.inf}, "sigma must be between 0 and 100, not inf"),
        ("pathological", {"classes_per_client": 0}, "classes_per_client must be at least 1, not 0"),
        ("pathological", {"classes_per_client": 6}, "classes_per_client must be at most 5.*not 6"),
        (
            "label_quantity",
            {"classes_per_client": 6},
            "classes_per_client must be at most 5.*not 6",
        ),
        ("pathological", {"least": 0}, "least must be at least 1"),
        ("power_law", {"classes_per_client": 6}, "classes_per_client must be at most 5.*not 6"),
        ("power_law", {"least": 41}, "least must be at most .* share a class with .* not 41"),
        ("power_law", {"sigma": -1.0}, "sigma must be between 0 and 100, not -1"),
        ("quantity", {"alpha": 0.0}, "alpha must be between 1e-09"),
        ("exponential", {"rate": -1.0}, "rate must be between 0 and 100"),
        ("polynomial", {"degree": math.nan}, "degree must be between 0 and 100"),
        ("similarity", {"share": 1.5}, "share must be between 0 and 1"),
        ("class_prior", {"sizes": "natural"}, "natural.*needs data with the client"),
        ("shards", {"per_client": 0}, "per_client must be at least 1"),
        ("shards", {"per_client": 21}, "need 210, but there are 200"),
        ("natural", {}, "natural.*needs data with the client of each sample"),
    ],
)
def test_values_that_are_not_allowed_are_refused_in_one_line(
    name: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidValue, match=text) as info:
        make(name, some_labels(200, 5), 10, **options)
    assert "\n" not in str(info.value)


# iid


@PROPERTIES
@given(clients=st.integers(1, 30), samples=st.integers(30, 200), seed=st.integers(0, 99))
def test_iid_sizes_differ_by_at_most_one(clients: int, samples: int, seed: int) -> None:
    sizes = make("iid", some_labels(samples, 3), clients, seed).sizes
    assert set(sizes.tolist()) <= {samples // clients, -(-samples // clients)}


@PROPERTIES
@given(clients=st.integers(1, 30), samples=st.integers(30, 200), seed=st.integers(0, 99))
def test_iid_balanced_deals_out_every_class(clients: int, samples: int, seed: int) -> None:
    labels = some_labels(samples, 4, seed)
    partition = make("iid", labels, clients, seed, balanced=True)
    assert_each_sample_once(partition, samples)
    assert np.ptp(partition.sizes) <= 1
    assert np.ptp(np.array(histogram_by_loops(partition, labels, 4)), axis=0).max() <= 1


def test_iid_balanced_gives_five_images_of_each_of_100_classes_to_100_clients() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 500))
    assert (make("iid", labels, 100, balanced=True).histogram(labels, 100) == 5).all()


def test_iid_labels_are_hypergeometric() -> None:
    """Label counts of IID clients have the hypergeometric variance.

    1,000 clients have 20 of 20,000 samples each, and class 1 has half of the samples. The mean is
    10 and the variance is 20/4 (N - 20)/(N - 1).
    """
    labels = np.arange(20_000) % 2
    class_counts = make("iid", labels, 1000).histogram(labels, 2)[:, 1]
    assert class_counts.mean() == 10
    assert (
        stats.chi2.ppf(1e-6, 999)
        < class_counts.var() * 1000 / (5 * 19_980 / 19_999)
        < stats.chi2.ppf(1 - 1e-6, 999)
    )


# lognormal


def test_lognormal_sizes_follow_the_distribution() -> None:
    clients, sigma = 2000, 0.3
    labels = np.zeros(clients * 500, dtype=np.int64)
    sizes = make("lognormal", labels, clients, sigma=sigma).sizes
    assert sizes.sum() == len(labels)
    logs = np.log(sizes)
    # After scaling to the given sum, the mean logarithm is ln(n / N) - sigma^2 / 2, because the
    # distribution has mean 1.
    assert logs.mean() == pytest.approx(
        math.log(500) - sigma**2 / 2, abs=5 * sigma / math.sqrt(clients)
    )
    assert logs.std() == pytest.approx(sigma, rel=0.08)
    assert stats.kstest((logs - logs.mean()) / logs.std(), "norm").pvalue > 1e-3


def test_lognormal_without_spread_is_balanced_and_with_much_keeps_everyone() -> None:
    assert set(make("lognormal", some_labels(103, 3), 10, sigma=0.0).sizes.tolist()) == {10, 11}
    sizes = make("lognormal", some_labels(1000, 3), 50, sigma=100.0).sizes
    assert sizes.min() == 1
    assert sizes.max() == 951


@PROPERTIES
@given(
    weights=st.lists(st.integers(0, 99), min_size=1, max_size=12).filter(any),
    extra=st.integers(0, 80),
)
def test_apportion_equals_exact_fractions(weights: list[int], extra: int) -> None:
    total = len(weights) + extra
    free = set(range(len(weights)))
    while True:
        shared_total = total - (len(weights) - len(free))
        share = {
            i: Fraction(weights[i] * shared_total, sum(weights[j] for j in free)) for i in free
        }
        if all(share[i] >= 1 for i in free):
            break
        free = {i for i in free if share[i] >= 1}
    exact = [share.get(i, Fraction(1)) for i in range(len(weights))]
    counts = apportion(np.array(weights, dtype=np.float64), total).tolist()
    assert sum(counts) == total
    assert all(
        math.floor(value) <= number <= math.floor(value) + 1
        for value, number in zip(exact, counts, strict=True)
    )
    remainders = sorted((value % 1 for value in exact), reverse=True)
    raised = sorted(
        (value % 1 for value, number in zip(exact, counts, strict=True) if number > value),
        reverse=True,
    )
    assert raised == remainders[: len(raised)]


def test_apportion_equals_cases_worked_by_hand() -> None:
    assert apportion(np.array([1.0, 2.0, 3.0]), 7).tolist() == [1, 2, 4]  # 1.17, 2.33, 3.5
    assert apportion(np.array([0.0, 1.0, 3.0]), 9).tolist() == [1, 2, 6]


# natural


def test_natural_clients_are_the_groups() -> None:
    groups = np.random.default_rng(0).permutation(np.repeat([7, 2, 30, 4], [5, 9, 3, 8]))
    partition = make("natural", np.zeros(25, dtype=np.int64), 0, 1, groups, minimum=5)
    members = [sorted(partition[client].tolist()) for client in range(len(partition))]
    assert members == [np.flatnonzero(groups == group).tolist() for group in (2, 4, 7)]


def test_natural_takes_a_random_choice_of_the_able_clients() -> None:
    groups = np.repeat(np.arange(20), np.arange(1, 21))
    chosen = set()
    for seed in range(10):
        partition = make(
            "natural", np.zeros(len(groups), dtype=np.int64), 4, seed, groups, minimum=11
        )
        owners = [set(groups[partition[client]].tolist()) for client in range(4)]
        assert all(len(owner) == 1 for owner in owners)
        assert partition.sizes.tolist() == sorted(partition.sizes.tolist())
        assert partition.sizes.min() >= 11
        chosen.add(tuple(partition.sizes.tolist()))
    assert len(chosen) > 5


def test_natural_with_too_few_able_clients_is_refused() -> None:
    groups = np.array([0, 0, 0, 1, 1, 2])
    labels = np.zeros(6, dtype=np.int64)
    with pytest.raises(
        InvalidValue,
        match="clients is 3, but 2 of the 3 natural ones have at least 2 samples",
    ):
        make("natural", labels, 3, 0, groups, minimum=2)
    with pytest.raises(InvalidValue, match="but 0 of the 3 natural ones have at least 9"):
        make("natural", labels, 0, 0, groups, minimum=9)
    with pytest.raises(InvalidValue, match="clients must be at least 0, not -1"):
        make("natural", labels, -1, 0, groups)


def test_natural_clients_may_be_several_groups_each() -> None:
    groups = np.random.default_rng(0).integers(0, 23, 600)
    labels = np.zeros(600, dtype=np.int64)
    partition = make("natural", labels, 0, 3, groups, together=4)
    groups_of_clients = [
        sorted(set(groups[partition[client]].tolist())) for client in range(len(partition))
    ]
    assert [len(some) for some in groups_of_clients] == [4, 4, 4, 4, 7]  # 23 = 5 x 4 + 3
    assert sorted(group for some in groups_of_clients for group in some) == list(range(23))
    assert_each_sample_once(partition, 600)
    few = make("natural", labels, 2, 3, groups, together=4)
    assert all(
        sorted(set(groups[few[client]].tolist())) in groups_of_clients for client in range(2)
    )
    with pytest.raises(InvalidValue, match="have at least 1 samples, and a client is 12 of them"):
        make("natural", labels, 2, 3, groups, together=12)


# Unequal sizes, and similarity


@pytest.mark.parametrize(
    ("name", "options", "weights"),
    [
        ("exponential", {"rate": 0.2}, np.exp(0.2 * np.arange(8))),
        ("polynomial", {"degree": 1.0}, np.arange(1.0, 9.0)),
        ("polynomial", {"degree": 2.0}, np.arange(1.0, 9.0) ** 2),
        ("polynomial", {"degree": 0.0}, np.ones(8)),
        ("exponential", {"rate": 0.0}, np.ones(8)),
    ],
)
def test_sizes_follow_their_weights(
    name: str, options: dict[str, Any], weights: np.ndarray
) -> None:
    sizes = make(name, some_labels(20_000, 4), 8, **options).sizes
    assert np.allclose(sizes, 20_000 * weights / weights.sum(), atol=1)


def test_extreme_sizes_leave_every_client_a_sample() -> None:
    for name, options in (
        ("exponential", {"rate": 100.0}),
        ("polynomial", {"degree": 100.0}),
        ("quantity", {"alpha": 1e-9}),
    ):
        sizes = make(name, some_labels(500, 3), 50, **options).sizes
        assert (sizes.min(), sizes.sum()) == (1, 500)


def test_quantity_shares_follow_the_dirichlet_distribution() -> None:
    """The N shares ~ Dir(a) have variance (N - 1) / (N^2 (N a + 1)).

    With a large alpha, the sizes are equal.
    """
    shares = (
        np.concatenate(
            [
                make("quantity", some_labels(50_000, 2), 20, seed, alpha=2.0).sizes
                for seed in range(60)
            ]
        )
        / 50_000
    )
    assert shares.var() == pytest.approx(19 / (400 * 41), rel=0.15)
    assert np.ptp(make("quantity", some_labels(1000, 2), 10, alpha=1e9).sizes) <= 1


def test_similarity_goes_from_one_run_of_the_sorted_labels_to_iid() -> None:
    labels = some_labels(2000, 10)
    for share in (0.0, 0.1, 0.5, 1.0):
        partition = make("similarity", labels, 20, share=share)
        assert_each_sample_once(partition, 2000)
        assert set(partition.sizes.tolist()) == {100}
        counts = partition.histogram(labels, 10)
        expected = 100 * share / 10  # per class, from the IID samples
        if share in (0.0, 0.1):
            assert (
                (counts > 4 * expected + 1).sum(axis=1) <= 3
            ).all()  # 100 consecutive samples contain at most two or three classes
        if share == 0.0:
            assert ((counts > 0).sum(axis=1) <= 3).all()
        if share == 1.0:
            like = make("iid", labels, 20).histogram(labels, 10)
            assert stats.chi2_contingency(counts).pvalue > 1e-3
            assert counts.std() == pytest.approx(like.std(), rel=0.3)


@PROPERTIES
@given(
    share=st.floats(0, 1),
    clients=st.integers(1, 12),
    samples=st.integers(12, 90),
    seed=st.integers(0, 99),
)
def test_similarity_of_any_share_is_balanced(
    share: float, clients: int, samples: int, seed: int
) -> None:
    partition = make("similarity", some_labels(samples, 5, seed), clients, seed, share=share)
    assert_each_sample_once(partition, samples)
    assert np.ptp(partition.sizes) <= 1


def test_class_prior_takes_the_sizes_of_another_partition() -> None:
    labels = some_labels(3000, 5)
    sizes = make("lognormal", labels, 15, 4, sigma=0.8).sizes
    partition = make("class_prior", labels, 15, 4, alpha=0.1, sizes="lognormal(0.8)")
    assert np.array_equal(partition.sizes, sizes)
    assert_each_sample_once(partition, 3000)
    shares = partition.histogram(labels, 5) / sizes[:, None]
    assert float(np.median(shares.max(axis=1))) > 0.6
