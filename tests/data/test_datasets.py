"""The embedded and the generated data sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.linear_model import LinearRegression

import fedloom as fl
from data_support import make
from fedloom.common.errors import InvalidValue
from fedloom.data.dataset import Dataset, Samples, hold_out


def test_digits_keeps_every_pixel_and_every_image() -> None:
    data = make("digits")
    source = load_digits()
    samples = data.train.concatenate(data.test)
    assert data.spec.shape == (1, 8, 8)
    assert len(samples) == 1797
    counts = (samples.inputs.flatten(1).double() * 16).numpy()
    rows = sorted(
        (tuple(pixels), int(label)) for pixels, label in zip(counts, samples.labels, strict=True)
    )
    assert rows == sorted(
        (tuple(image.ravel()), int(label))
        for image, label in zip(source.images, source.target, strict=True)
    )


def test_digits_are_the_same_without_scikit_learns_file(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = make("digits").train
    monkeypatch.setattr("fedloom.data.sets.bundled.find_spec", lambda name: None)
    packaged = make("digits").train
    assert torch.equal(packaged.inputs, direct.inputs)
    assert torch.equal(packaged.labels, direct.labels)


def test_digits_split_is_stratified_and_always_the_same() -> None:
    data, repeated = make("digits"), make("digits")
    assert torch.equal(data.test.inputs, repeated.test.inputs)
    counts = np.bincount(load_digits().target)
    assert data.train.labels.bincount().tolist() == [int(count * 8 // 10) for count in counts]
    assert (data.train.labels.bincount() + data.test.labels.bincount()).tolist() == counts.tolist()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_test_fraction_outside_0_and_1_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidValue, match="test_fraction must be between 0 and 1"):
        make("digits", test_fraction=fraction)


def test_hold_out_takes_its_share_of_every_group_and_keeps_the_order() -> None:
    groups = torch.tensor([7] * 100 + [3] * 11 + [5] * 1)[
        torch.randperm(112, generator=torch.Generator().manual_seed(1))
    ]
    samples = Samples(torch.arange(112), torch.zeros(112, dtype=torch.long), groups)
    train, test = hold_out(samples, 0.71, 4, within=groups)
    assert train.groups is not None
    assert [int((train.groups == group).sum()) for group in (7, 3, 5)] == [29, 3, 1]
    assert train.inputs.tolist() == sorted(train.inputs.tolist())
    assert sorted(train.inputs.tolist() + test.inputs.tolist()) == list(range(112))
    assert not torch.equal(train.inputs, hold_out(samples, 0.71, 5, within=groups)[0].inputs)


def test_a_fifth_of_a_users_regression_is_held_out() -> None:
    inputs, targets = np.random.default_rng(0).standard_normal((2, 50))
    task = fl.make_task(fl.Samples(inputs[:, None], targets), objective="regression", clients=2)
    assert (len(task.train), len(task.test)) == (40, 10)


def test_synthetic_has_the_sizes_of_the_authors() -> None:
    data = make("synthetic", alpha=1.0, beta=1.0, seed=3)
    assert data.train.groups is not None
    assert data.test.groups is not None
    train, test = data.train.groups.bincount(minlength=30), data.test.groups.bincount(minlength=30)
    sizes = train + test
    assert data.spec.shape == (60,)
    assert (len(sizes), int(sizes.min()) >= 50) == (30, True)
    assert train.tolist() == [int(0.9 * size) for size in sizes.tolist()]
    # The median of int(LogNormal(4, 2)) + 50 is e^4 + 50, about 104.
    many = make("synthetic", users=400, dimension=2, seed=1)
    assert many.train.groups is not None
    assert many.test.groups is not None
    median = (many.train.groups.bincount() + many.test.groups.bincount()).float().median()
    assert 90 < float(median) < 120


def _linear_fit_agrees(data: Dataset, users: list[int]) -> float:
    """Return the share of training labels that a multinomial model fitted to `users` predicts."""
    from sklearn.linear_model import LogisticRegression

    assert data.train.groups is not None
    chosen = torch.isin(data.train.groups, torch.tensor(users))
    x, y = data.train.inputs[chosen].numpy(), data.train.labels[chosen].numpy()
    return float(LogisticRegression(C=1e3, max_iter=300).fit(x, y).score(x, y))


def test_one_linear_model_fits_all_users_only_if_they_share_it() -> None:
    options = {"users": 20, "seed": 2}
    shared = _linear_fit_agrees(make("synthetic_feddc", **options), list(range(20)))
    separate = _linear_fit_agrees(make("synthetic_feddc", alpha=1.0, **options), list(range(20)))
    assert shared > 0.97
    assert separate < 0.8


def test_beta_separates_the_inputs_of_users() -> None:
    def spread(beta: float) -> float:
        data = make("synthetic_feddc", beta=beta, seed=5)
        assert data.train.groups is not None
        means = [data.train.inputs[data.train.groups == user].mean(0) for user in range(20)]
        return float(torch.stack(means).std(0).mean())

    assert spread(0.0) < 0.1
    # v_i has standard deviation sqrt(1 + beta^2) in each coordinate.
    assert 1.0 < spread(1.0) < 2.0


def test_input_covariance_falls_as_the_power_of_the_coordinate() -> None:
    data = make("synthetic_feddc", users=40, samples=500, test="train", seed=8)
    variance = data.train.inputs.var(0)
    expected = torch.arange(1, 31) ** -1.2
    assert torch.allclose(variance, expected, rtol=0.06)


def test_synthetic_feddc_has_feddcs_sizes_and_two_test_sets() -> None:
    held_out, union = make("synthetic_feddc"), make("synthetic_feddc", test="train")
    assert held_out.train.groups is not None
    assert held_out.train.groups.bincount().tolist() == [160] * 20
    assert len(held_out.test) == 800
    assert torch.equal(union.test.inputs, union.train.inputs)
    assert len(union.train) == 4000


def test_synthetic_iid_shares_one_model_and_centre() -> None:
    data = make("synthetic", iid=True, users=12, seed=6)
    assert _linear_fit_agrees(data, list(range(12))) > 0.97
    assert float(data.train.inputs.mean(0).abs().max()) < 0.2


def test_a_user_does_not_change_with_the_number_of_users() -> None:
    few, many = (
        make("synthetic_feddc", alpha=1.0, beta=1.0, users=n, test="train") for n in (3, 9)
    )
    assert torch.equal(few.train.inputs, many.train[:600].inputs)
    assert torch.equal(few.train.labels, many.train[:600].labels)
    other_seed = make("synthetic_feddc", alpha=1.0, beta=1.0, users=3, test="train", seed=1)
    assert not torch.equal(few.train.inputs, other_seed.train.inputs)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("synthetic", {"alpha": -1.0}, "alpha must be at least 0 .*not -1.0"),
        ("synthetic", {"beta": float("nan")}, "beta must be"),
        ("synthetic", {"users": 0}, "users must be at least 1, not 0"),
        ("synthetic", {"iid": True, "alpha": 1.0}, "iid=True needs alpha=0"),
        ("synthetic_feddc", {"samples": 1}, "samples must be at least 2"),
        ("synthetic_feddc", {"test": "trian"}, "did you mean 'train'"),
    ],
)
def test_synthetic_refuses_bad_options(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidValue, match=text) as caught:
        make(name, **options)
    assert "\n" not in str(caught.value)


# --- tables of scikit-learn ---


@pytest.mark.parametrize(
    ("name", "load"),
    [("wine", load_wine), ("breast_cancer", load_breast_cancer), ("diabetes", load_diabetes)],
)
def test_tables_keep_every_sample_standardised_by_the_training_part(
    name: str, load: Callable[[], Any]
) -> None:
    data, source = make(name), load()
    assert data.train.inputs.mean(0).abs().max() < 1e-5
    assert (data.train.inputs.std(0, correction=0) - 1).abs().max() < 1e-5
    assert len(data.train) + len(data.test) == len(source.data)
    inputs = torch.cat([data.train.inputs, data.test.inputs]).double().numpy()
    scaled = (source.data - source.data.mean(0)) / source.data.std(0)
    assert np.allclose(
        np.corrcoef(np.sort(inputs, 0).T), np.corrcoef(np.sort(scaled, 0).T), atol=1e-4
    )
    if data.objective.classes:
        assert sorted([*data.train.labels.tolist(), *data.test.labels.tolist()]) == sorted(
            source.target.tolist()
        )
        assert data.class_names == tuple(source.target_names)


def test_federated_regression_comes_as_near_as_least_squares_on_all_data() -> None:
    data = make("diabetes")
    exact = LinearRegression().fit(data.train.inputs, data.train.labels)
    error = float(
        np.sqrt(np.mean((exact.predict(data.test.inputs) - data.test.labels.numpy()) ** 2))
    )
    task = fl.make_task(
        data,
        clients=10,
        partition="dirichlet(0.5)",
        model="logistic",
        training={"learning_rate": 0.05},
    )
    result = fl.run("scaffold", task, rounds=60, participation=1.0, engine="stacked")
    assert result.score == pytest.approx(error, rel=0.02)
    assert result.history[-1]["r2"] > 0.3
    assert result.best_score <= result.score


@pytest.mark.parametrize(("name", "least"), [("wine", 0.94), ("breast_cancer", 0.95)])
def test_tables_are_classified_by_averaged_models(name: str, least: float) -> None:
    task = fl.make_task(
        name,
        clients=5,
        partition="dirichlet(0.5)",
        model="logistic",
        training={"learning_rate": 0.1},
    )
    assert fl.run("fedavg", task, rounds=40, participation=1.0, engine="stacked").accuracy >= least
