"""Partition class, its files, and the division into training and test samples per client."""

from __future__ import annotations

import math
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.common.errors import CheckpointError, DataError, InvalidValue
from fedloom.data.partition import Partition, split_train_test
from partition_support import histogram_by_loops, make, some_labels

PROPERTIES = settings(max_examples=25, deadline=None)


# The class


@PROPERTIES
@given(st.lists(st.integers(-1, 4), max_size=40))
def test_from_owners_equals_a_loop(owners: list[int]) -> None:
    samples = np.arange(len(owners)) * 7
    naive: list[list[int]] = [[] for _ in range(5)]
    for sample, owner in zip(samples.tolist(), owners, strict=True):
        if owner >= 0:
            naive[owner].append(sample)
    partition = Partition.from_owners(samples, np.array(owners, dtype=np.int64), 5)
    assert [partition[client].tolist() for client in range(5)] == naive
    assert partition.sizes.tolist() == [len(members) for members in naive]


def test_histogram_equals_counting_by_loops() -> None:
    labels = some_labels(500, 6)
    partition = make("dirichlet", labels, 9, alpha=0.5, minimum=1)
    assert partition.histogram(labels, 7).tolist() == histogram_by_loops(partition, labels, 7)


# Files of `fixed`


def test_a_saved_partition_comes_back(tmp_path: Path) -> None:
    labels = some_labels(100, 4)
    partition = make("dirichlet", labels, 5, minimum=1)
    path = tmp_path / "split.npz"
    partition.save(path)
    for clients in (0, 5):
        repeated = make("fixed", labels, clients, 99, file=str(path))
        assert np.array_equal(repeated.indices, partition.indices)
        assert np.array_equal(repeated.offsets, partition.offsets)
    assert [entry.name for entry in tmp_path.iterdir()] == ["split.npz"]


@pytest.mark.parametrize(
    ("indices", "offsets", "text"),
    [
        ([0, 1, 2], [0, 1], "offsets must rise from 0 to 3"),
        ([0, 1, 2], [1, 3], "offsets must rise from 0 to 3"),
        ([0, 1, 2], [0, 3, 2, 3], "offsets must rise from 0 to 3"),
        ([0, 1, 2], [], "'offsets' must be one row of whole numbers|offsets must rise"),
        ([0.0, 1.0], [0, 2], "'indices' must be one row of whole numbers"),
        ([[0, 1]], [0, 2], "'indices' must be one row of whole numbers"),
        ([0, 10], [0, 2], "holds sample 10, but the data end at sample 9"),
        ([0, -1], [0, 2], "holds sample -1"),
        ([0, 4, 4], [0, 2, 3], "holds sample 4 2 times"),
        ([object()], [0, 1], "damaged, or neither an npz file .*Object arrays"),
    ],
)
def test_files_that_hold_no_partition_are_refused(
    tmp_path: Path, indices: Any, offsets: Any, text: str
) -> None:
    path = tmp_path / "split.npz"
    np.savez(path, indices=np.array(indices), offsets=np.array(offsets))
    with pytest.raises(DataError, match=text) as info:
        make("fixed", some_labels(10, 2), 0, file=str(path))
    assert "split.npz" in str(info.value)
    assert "\n" not in str(info.value)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    labels = some_labels(10, 2)
    with pytest.raises(DataError, match="cannot be read"):
        make("fixed", labels, 0, file=str(tmp_path / "none.npz"))
    with pytest.raises(DataError, match="is no partition file: its array 'indices'"):
        make("fixed", labels, 0, file=str(tmp_path))
    foreign = tmp_path / "foreign.npz"
    np.savez(foreign, other=np.arange(3))
    with pytest.raises(DataError, match="is no partition file: its array 'indices'"):
        make("fixed", labels, 0, file=str(foreign))
    with pytest.raises(CheckpointError, match="cannot be written"):
        make("iid", labels, 2).save(tmp_path / "nowhere" / "split.npz")
    make("iid", labels, 2).save(foreign)
    with pytest.raises(InvalidValue, match=r"clients must be 2, the number in .*, or 0, not 3"):
        make("fixed", labels, 3, file=str(foreign))


class _Ran:
    """Code from a hostile file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(tempfile.gettempdir()) / "fedloom-ran-code",))


def test_loading_never_runs_code(tmp_path: Path) -> None:
    mark = Path(tempfile.gettempdir()) / "fedloom-ran-code"
    path = tmp_path / "split.npz"
    np.savez(path, indices=np.array([_Ran()], dtype=object), offsets=np.array([0, 1]))
    (tmp_path / "plain.npz").write_bytes(pickle.dumps(_Ran()))
    for name in ("split.npz", "plain.npz"):
        with pytest.raises(DataError):
            Partition.load(tmp_path / name)
    assert not mark.exists()


def test_an_archive_that_claims_an_unknown_zip_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "split.npz"
    Partition.of([[0], [1]]).save(path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 6] = (
        255  # "version needed to extract" of the first member
    )
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged, or neither an npz"):
        Partition.load(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_right(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "split.npz"
        partition = Partition.of([[3, 1], [], [2, 0, 4]])
        partition.save(path)
        content = bytearray(path.read_bytes())
        for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
            content[position] = data.draw(st.integers(0, 255))
        path.write_bytes(
            bytes(content[: data.draw(st.integers(0, len(content)))])
            if data.draw(st.booleans())
            else content
        )
        try:
            loaded = Partition.load(path)
        except DataError as refusal:
            line = str(refusal)
        else:
            line = ""
            assert loaded.indices.tolist() == partition.indices.tolist()
            assert loaded.offsets.tolist() == partition.offsets.tolist()
        assert "\n" not in line


# Training and test samples of each client


@PROPERTIES
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    fraction=st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.9, 0.99]),
    seed=st.integers(0, 2**40),
)
def test_every_client_is_split_by_the_rule(sizes: list[int], fraction: float, seed: int) -> None:
    partition = Partition.from_sizes(np.random.default_rng(1).permutation(sum(sizes)), sizes)
    train, test = split_train_test(partition, seed, fraction)
    for client, size in enumerate(sizes):
        all_samples = [*train[client].tolist(), *test[client].tolist()]
        assert sorted(all_samples) == sorted(partition[client].tolist())
        train_size = math.floor(round((1 - fraction) * size, 6))
        expected = size if size < 2 else min(max(train_size, 1), size - 1)
        assert len(train[client]) == expected


def test_a_split_depends_on_the_seed_and_the_clients_own_samples_alone() -> None:
    partition = make("lognormal", some_labels(1000, 3), 10, sigma=1.0)
    train, test = split_train_test(partition, 5)
    repeated, other_seed = split_train_test(partition, 5)[0], split_train_test(partition, 6)[0]
    assert np.array_equal(train.indices, repeated.indices)
    assert np.array_equal(train.offsets, other_seed.offsets)
    assert not np.array_equal(train.indices, other_seed.indices)
    alone_train, alone_test = split_train_test(Partition.of([np.sort(partition[7])]), 5)
    assert alone_train[0].tolist() == train[7].tolist()
    assert alone_test[0].tolist() == test[7].tolist()


def test_a_split_takes_every_sample_and_pair_equally_often() -> None:
    """Each sample and each pair has equal probability of selection for testing.

    Each client tests on 2 of 8 neighbours. Over clients and seeds, the probabilities are 1/4 per
    sample and 1/28 per pair.
    """
    clients = 28_000
    test = split_train_test(Partition.from_sizes(np.arange(8 * clients), np.full(clients, 8)), 11)[
        1
    ]
    pairs = np.sort(test.indices.reshape(clients, 2) % 8, axis=1)
    counts = np.bincount(pairs[:, 0] * 8 + pairs[:, 1], minlength=64)
    assert stats.chisquare(counts[counts > 0]).pvalue > 1e-4
    assert (counts > 0).sum() == 28
    single_client = Partition.of([np.arange(8)])
    taken = np.concatenate([split_train_test(single_client, seed)[1][0] for seed in range(2000)])
    assert stats.chisquare(np.bincount(taken, minlength=8)).pvalue > 1e-4


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, math.nan])
def test_a_fraction_outside_0_and_1_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidValue, match=r"fraction .* must be between 0 and 1, not"):
        split_train_test(Partition.of([[1, 2]]), 0, fraction)


def test_a_million_clients_are_cheap() -> None:
    partition = make("iid", np.zeros(2_000_000, dtype=np.int64), 1_000_000)
    train, test = split_train_test(partition, 0)
    assert (train.sizes == 1).all()
    assert (test.sizes == 1).all()
    assert_each = np.bincount(np.concatenate([train.indices, test.indices]), minlength=2_000_000)
    assert (assert_each == 1).all()
