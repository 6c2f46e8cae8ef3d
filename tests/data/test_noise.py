"""Label noise: number, clients and values of replaced labels; all other data stay equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fedloom as fl
from fedloom.common.errors import FedloomError
from fedloom.data.noise import LabelNoise, label_noises
from fedloom.data.partition import Partition
from fedloom.engines.client_work import slim
from fedloom.runs.config_file import load
from fedloom.runs.directory import RunDirectory
from fedloom.state.tensors import read_tensors
from fedloom.task import Task, withhold
from partition_support import some_labels

PROPERTIES = settings(max_examples=50, deadline=None)
KINDS = st.sampled_from(("symmetric", "paired"))
RATES = st.floats(0, 1, allow_subnormal=False)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def noise_of(kind: str, rate: float | list[float]) -> LabelNoise:
    return label_noises[kind].make(rate)


def some_partition(sizes: list[int], spare: int = 5) -> tuple[Partition, int]:
    """Return clients of the given sizes with samples in random order, and the number of all
    samples.

    No client has the last `spare` samples.
    """
    count = sum(sizes) + spare
    order = np.random.default_rng(sum(sizes)).permutation(count)
    return Partition.from_sizes(order[: sum(sizes)], sizes), count


@PROPERTIES
@given(kind=KINDS, rate=RATES, sizes=SIZES, classes=st.integers(2, 12), seed=st.integers(0, 2**40))
def test_each_client_has_its_share_of_labels_replaced(
    kind: str, rate: float, sizes: list[int], classes: int, seed: int
) -> None:
    partition, count = some_partition(sizes)
    labels = some_labels(count, classes)
    original = labels.copy()
    noisy = noise_of(kind, rate).apply(labels, partition, classes, seed)
    repeated = noise_of(kind, [rate, rate]).apply(labels, partition, classes, seed)
    assert np.array_equal(noisy, repeated)
    assert np.array_equal(labels, original)
    assert noisy.dtype == np.int64
    assert noisy.min() >= 0
    assert noisy.max() < classes
    changed = noisy != labels
    assert not changed[np.setdiff1d(np.arange(count), partition.indices)].any()
    for client, size in enumerate(sizes):
        replaced = int(changed[partition[client]].sum())
        # A symmetric replacement may equal the true label, so this only checks a bound.
        assert replaced <= np.ceil(rate * size)
        if kind == "paired":
            assert replaced >= np.floor(rate * size)
    if kind == "paired":
        assert np.array_equal(noisy[changed], (labels[changed] + 1) % classes)


@PROPERTIES
@given(kind=KINDS, sizes=SIZES, seed=st.integers(0, 2**40), low=RATES, high=RATES)
def test_a_higher_rate_replaces_the_same_labels_and_more(
    kind: str, sizes: list[int], seed: int, low: float, high: float
) -> None:
    low, high = sorted((low, high))
    partition, count = some_partition(sizes)
    labels = some_labels(count, 10)
    few, many = (noise_of(kind, rate).apply(labels, partition, 10, seed) for rate in (low, high))
    assert np.array_equal(many[few != labels], few[few != labels])


@pytest.mark.parametrize("kind", ["symmetric", "paired"])
def test_the_mean_share_is_exact_however_small_the_clients_are(kind: str) -> None:
    """The mean share of noise is exact even for twenty thousand clients of one sample.

    Rounding the count of each client would replace no labels or all labels.
    """
    partition = Partition.from_sizes(np.arange(20_000), [1] * 20_000)
    labels = some_labels(20_000, 10)
    wrong = (noise_of(kind, 0.3).apply(labels, partition, 10, 1) != labels).mean()
    assert wrong == pytest.approx(0.3 if kind == "paired" else 0.27, abs=0.015)


def test_symmetric_replacements_are_uniform_over_classes_and_samples() -> None:
    labels, partition = np.zeros(500, np.int64), Partition.from_sizes(np.arange(500), [200, 300])
    noisy = np.stack(
        [noise_of("symmetric", 0.5).apply(labels, partition, 5, seed) for seed in range(200)]
    )
    counts = np.bincount(noisy.ravel(), minlength=5)
    replaced_by_zero = counts[0] - noisy.size // 2
    assert stats.chisquare([replaced_by_zero, *counts[1:]]).pvalue > 1e-4
    # Each label is wrong with probability 0.5 * 4 / 5, independently over seeds.
    wrong = (noisy != 0).sum(0)
    assert stats.kstest((wrong - 80) / np.sqrt(200 * 0.4 * 0.6), "norm").pvalue > 1e-4
    assert abs(np.corrcoef(noisy[:, 0] != 0, noisy[:, 1] != 0)[0, 1]) < 0.3


def test_clients_rates_are_uniform_in_the_range() -> None:
    rates = noise_of("paired", [0.1, 0.6]).rates(5000, seed=3)
    assert stats.kstest(rates, stats.uniform(0.1, 0.5).cdf).pvalue > 1e-3
    partition = Partition.from_sizes(np.arange(60_000), [2000] * 30)
    labels = some_labels(60_000, 10)
    wrong = noise_of("paired", [0.1, 0.6]).apply(labels, partition, 10, 3) != labels
    shares = wrong.reshape(30, 2000).mean(1)
    assert np.abs(shares - noise_of("paired", [0.1, 0.6]).rates(30, 3)).max() <= 1 / 2000


def noisy_task(label_noise: str, **options: Any) -> Task:
    task_options = {
        "clients": 6,
        "partition": "dirichlet(1.0)",
        "model": "mlp(hidden=[8])",
        "seed": 4,
    } | options
    return fl.make_task("digits", label_noise=label_noise, **task_options)  # type: ignore[arg-type]


@settings(max_examples=12, deadline=None)
@given(
    noise=st.sampled_from(("symmetric(0.9)", "paired([0.2, 1])")),
    merge=st.booleans(),
    local=st.booleans(),
)
def test_test_labels_are_never_touched(noise: str, merge: bool, local: bool) -> None:
    options: dict[str, Any] = {"merge": merge, "local_test": 0.3 if local or merge else None}
    clean, noisy = noisy_task("none", **options), noisy_task(noise, **options)
    assert clean.true_labels is None
    assert noisy.true_labels is not None
    assert torch.equal(noisy.true_labels, clean.train.labels)
    assert torch.equal(noisy.test.labels, clean.test.labels)
    assert torch.equal(noisy.train.inputs, clean.train.inputs)
    if noisy.local_test is not None:
        test_rows = torch.from_numpy(noisy.local_test.indices)
        assert torch.equal(noisy.train.labels[test_rows], clean.train.labels[test_rows])
    wrong = (noisy.train.labels != noisy.true_labels)[torch.from_numpy(noisy.partition.indices)]
    assert 0.4 < wrong.float().mean() < 0.95
    assert torch.equal(noisy_task(noise, **options).train.labels, noisy.train.labels)
    assert not torch.equal(noisy_task(noise, **options, seed=5).train.labels, noisy.train.labels)


def test_validation_samples_have_their_true_labels() -> None:
    task = noisy_task("paired(1.0)", local_test=0.25)
    assert task.true_labels is not None
    assert task.local_test is not None
    withheld = withhold(task, 0.4, seed=1)
    assert withheld.local_test is not None
    test_rows = torch.from_numpy(np.sort(withheld.local_test.indices))
    assert torch.equal(withheld.test.labels, task.true_labels[test_rows])
    assert torch.equal(withheld.train.labels[test_rows], task.true_labels[test_rows])
    trained = torch.from_numpy(withheld.partition.indices)
    assert bool((withheld.train.labels[trained] != task.true_labels[trained]).all())


RUN: dict[str, Any] = {"rounds": 3, "participation": 0.5, "seed": 4}


@pytest.mark.parametrize("noise", ["symmetric(0)", "paired([0.0, 0.0])"])
def test_a_rate_of_0_changes_no_bit(noise: str) -> None:
    clean, noisy = (
        fl.run("fedmr", noisy_task("none"), **RUN),
        fl.run("fedmr", noisy_task(noise), **RUN),
    )
    for parameter, expected in zip(clean.model.parameters(), noisy.model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    assert noisy.history == clean.history


@pytest.mark.parametrize("engine", ["rows", "stacked", "processes(workers=1)"])
def test_every_engine_trains_on_the_noisy_labels(engine: str) -> None:
    """Every engine trains as on a data set with the noisy labels in its files."""
    noisy = noisy_task("symmetric(0.6)", local_test=0.25)
    train = fl.Samples(noisy.dataset.train.inputs, noisy.train.labels)
    by_hand = Task(
        fl.Dataset("digits", train, noisy.test, 10), train, noisy.test, noisy.partition, noisy.model,
        noisy.training, noisy.local_test,
    )  # fmt: skip
    result, expected = (fl.run("ditto", task, engine=engine, **RUN) for task in (noisy, by_hand))
    clean = fl.run("ditto", noisy_task("none", local_test=0.25), **RUN)
    for parameter, expected_parameter in zip(
        result.model.parameters(), expected.model.parameters(), strict=True
    ):
        assert torch.equal(parameter, expected_parameter)
    assert result.history == expected.history
    assert result.history != clean.history


def test_workers_are_sent_no_true_labels() -> None:
    assert slim(noisy_task("symmetric(0.6)")).true_labels is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "symetric(0.4)",
            "unknown label noise 'symetric': did you mean 'symmetric'? (there are: paired, "
            "symmetric)",
        ),
        ("symmetric(1.2)", "rate must be between 0 and 1, or a range [lowest, highest], not 1.2"),
        ("paired(-0.1)", "rate must be between 0 and 1, or a range [lowest, highest], not -0.1"),
        (
            "paired([0.6, 0.1])",
            "rate must be between 0 and 1, or a range [lowest, highest], not [0.6, 0.1]",
        ),
        ("paired([0.6])", "rate must be between 0 and 1, or a range [lowest, highest], not [0.6]"),
        ("symmetric", "symmetric needs rate"),
        ("symmetric(x)", "symmetric: rate must be a number or a list, not 'x'"),
        ("symmetric(0.4, 2)", "symmetric takes at most 1 arguments (rate), not 2"),
        (
            "symmetric(rat=0.4)",
            "symmetric has no parameter 'rat': did you mean 'rate'? (it has: rate)",
        ),
    ],
)
def test_bad_noise_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(FedloomError) as caught:
        noisy_task(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["none", " None "])
def test_none_is_no_noise(text: str) -> None:
    assert label_noises.build_unless_none(text) is None


def test_configurations_and_settings_take_noise(tmp_path: Path) -> None:
    (tmp_path / "noisy.toml").write_text(
        "[settings]\ndata.label_noise = ['none', 'symmetric(0.4)']\n"
    )
    loaded = load(tmp_path / "noisy.toml", ["data.clients=6", "model=mlp(hidden=[8])"])
    clean, noisy = (setting.task(1) for setting in loaded.settings.values())
    assert clean.true_labels is None
    assert noisy.true_labels is not None
    assert torch.equal(clean.train.labels, noisy.true_labels)
    assert torch.equal(
        noisy.train.labels,
        noisy_task("symmetric(0.4)", partition="dirichlet(0.5)", seed=1).train.labels,
    )
    (tmp_path / "wrong.toml").write_text("[data]\nlabel_noise = 'symmetric(2)'\n")
    with pytest.raises(
        FedloomError,
        match=r"\Adata.label_noise = 'symmetric\(2\)': rate must be between 0 and 1[^\n]*\Z",
    ):
        load(tmp_path / "wrong.toml")


def test_labels_are_saved_with_the_split_and_reused_on_resumption(tmp_path: Path) -> None:
    task = noisy_task("symmetric([0.0, 0.6])")
    assert task.true_labels is not None
    fl.run("fedavg", task, directory=tmp_path, rounds=2)
    labels, _ = read_tensors(tmp_path / "labels.safetensors")
    assert torch.equal(labels["given"], task.train.labels)
    assert torch.equal(labels["true"], task.true_labels)
    summary = RunDirectory(tmp_path).summary()
    wrong = (task.train.labels != task.true_labels)[torch.from_numpy(task.partition.indices)]
    assert summary.wrong_labels == int(wrong.sum()) > 0
    counts = task.partition.histogram(task.train.labels.numpy(), 10)
    assert summary.label_counts == counts.tolist()
    longer = fl.run("fedavg", noisy_task("symmetric([0.0, 0.6])"), directory=tmp_path, rounds=4)
    uninterrupted = fl.run("fedavg", task, rounds=4)
    assert torch.equal(next(longer.model.parameters()), next(uninterrupted.model.parameters()))
    with pytest.raises(FedloomError, match="a run on other samples"):
        fl.run("fedavg", noisy_task("symmetric([0.0, 0.5])"), directory=tmp_path, rounds=6)


def test_reports_state_that_labels_are_noisy(tmp_path: Path) -> None:
    for noise, noisy in (("paired(0.5)", True), ("none", False)):
        fl.run("fedavg", noisy_task(noise), rounds=1).report(tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert ("By the labels given, of which 7" in page) == noisy
        assert (", by the labels given, of which 7" in page) == noisy
