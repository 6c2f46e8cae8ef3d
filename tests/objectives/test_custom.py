"""User-defined losses in a classification.

Tests accuracy and related metrics against a plain loop, all engines and later use.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedloom as fl
from fedloom.common.errors import CheckpointError, FedloomError, RefusedReply
from fedloom.common.expression import parse_value, plain
from fedloom.data.dataset import make_dataset
from fedloom.objectives.classification import Classification
from fedloom.objectives.custom import Custom, build_objective, expression_of
from fedloom.runs.config_file import configuration
from fedloom.sites.site import Site
from fedloom.sites.site_data import DataAgreement

OPTIONS: dict[str, Any] = {"rounds": 3, "participation": 1.0, "evaluate_every": 1, "quiet": True}


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return -(1 - p)^2 log p for each sample, with the probability p of the true class."""
    surprise = -outputs.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return (1 - (-surprise).exp()).square() * surprise


PATH = f"{__name__}:focal"


def task(objective: Any = focal, metrics: Any = ("accuracy",), **options: Any) -> fl.Task:
    usual = {
        "clients": 4,
        "partition": "iid",
        "model": "mlp(hidden=[12])",
        "training": {"learning_rate": 0.1},
    }
    return fl.make_task(
        "digits", objective=objective, metrics=list(metrics), **{**usual, **options}
    )


def figures(result: fl.Result) -> list[dict[str, Any]]:
    return [{name: record[name] for name in ("accuracy", "loss")} for record in result.history]


def test_it_trains_and_scores_as_a_plain_loop_does() -> None:
    training = {"learning_rate": 0.3, "momentum": 0.9, "batch_size": None, "epochs": 4}
    one_client = task(clients=1, model="logistic", training=training)
    result = fl.run("fedavg", one_client, **{**OPTIONS, "rounds": 1})
    model = one_client.module(one_client.initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        logits = model(one_client.train.inputs)
        chance = torch.stack(
            [logits[k].softmax(0)[label] for k, label in enumerate(one_client.train.labels)]
        )
        (-((1 - chance) ** 2) * chance.log()).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for trained, expected in zip(result.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(trained, expected, atol=1e-5)
    with torch.no_grad():
        logits = model(one_client.test.inputs)
    correct = [
        int(int(row.argmax()) == int(label))
        for row, label in zip(logits, one_client.test.labels, strict=True)
    ]
    assert result.history[0]["accuracy"] == pytest.approx(sum(correct) / len(correct))
    assert result.history[0]["loss"] == pytest.approx(
        float(focal(logits, one_client.test.labels).mean()), rel=1e-4
    )


def test_every_way_of_saying_it_gives_the_same_run(tmp_path: Path) -> None:
    expected = figures(fl.run("fedavg", task(), **OPTIONS))
    ways = [
        task(PATH),
        task(Classification(criterion=focal), ()),
        task(f"classification(criterion='{PATH}')"),
        task(f"classification(criterion={PATH}, top_k=2)", ["top_2"]),
    ]
    for way in ways:
        assert figures(fl.run("fedavg", way, **OPTIONS)) == expected
    assert [record["loss"] for record in fl.run("fedavg", task(metrics=()), **OPTIONS).history] == [
        pytest.approx(record["loss"]) for record in expected
    ]
    data = {"name": "digits", "clients": 4, "partition": "iid"}
    table = {"model": "mlp(hidden=[12])", "objective": PATH, "metrics": ["accuracy", "f1(average='macro')"], "data": data,
             "training": {"learning_rate": 0.1}, "directory": str(tmp_path), "targets": ["accuracy >= 0.5"]}  # fmt: skip
    result = fl.run("fedavg", configuration(table).task(0), **OPTIONS)
    assert figures(result) == expected
    assert 0 < result.history[-1]["f1_macro"] < 1


@pytest.mark.parametrize("engine", ["rows", "stacked", "processes"])
@pytest.mark.parametrize(
    "loss", [focal, lambda outputs, targets: focal(outputs, targets)], ids=["function", "lambda"]
)
def test_all_engines_give_the_figures_of_rows(engine: str, loss: Any) -> None:
    expected = figures(fl.run("fedavg", task(), **OPTIONS))
    for record, reference in zip(
        figures(fl.run("fedavg", task(loss), engine=engine, **OPTIONS)), expected, strict=True
    ):
        assert record == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize(
    "method", ["fedmr", "scaffold", "moon", "fedrod", "fedlc(fedavg)", "fedntd(fedavg)", "ditto"]
)
def test_methods_learn_by_it(method: str) -> None:
    options = {**OPTIONS, "rounds": 6} | ({"personal_every": 6} if method == "ditto" else {})
    result = fl.run(
        method, task(local_test=0.25, training={"learning_rate": 0.5, "batch_size": 10}), **options
    )
    assert result.history[-1]["personal_accuracy" if method == "ditto" else "accuracy"] > 0.5


def test_a_run_goes_on_and_one_with_another_loss_is_refused(tmp_path: Path) -> None:
    uninterrupted = fl.run("fedavg", task(), **OPTIONS)
    fl.run("fedavg", task(), directory=tmp_path, **{**OPTIONS, "rounds": 1})
    resumed = fl.run("fedavg", task(), directory=tmp_path, **OPTIONS)
    assert figures(resumed) == figures(uninterrupted)
    for loss in (lambda outputs, targets: focal(outputs, targets), None):
        with pytest.raises(CheckpointError, match="holds a run with another loss"):
            fl.run("fedavg", task(loss), directory=tmp_path, **OPTIONS)


class PerSample:
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize(
    "loss", [PerSample(), PerSample().__call__, nn.CrossEntropyLoss(reduction="none")]
)
def test_whatever_can_be_called_is_a_loss(loss: Any, tmp_path: Path) -> None:
    expected = figures(fl.run("fedavg", task(None), **OPTIONS))
    for record, reference in zip(
        figures(fl.run("fedavg", task(loss), directory=tmp_path, **OPTIONS)), expected, strict=True
    ):
        assert record == pytest.approx(reference, rel=1e-5)


def test_a_comparison_in_worker_processes_and_a_search_have_accuracies() -> None:
    result = fl.compare(["fedavg", "fedmr"], task(), seeds=[0, 1], workers=2, **OPTIONS)
    expected = [
        fl.run("fedavg", task(), seed=seed, **OPTIONS).history[-1]["accuracy"] for seed in (0, 1)
    ]
    assert result.frame().query("method == 'fedavg'")["accuracy"].tolist() == expected
    assert (
        fl.tune(
            "fedavg", task(), {"training.learning_rate": [0.01, 0.2]}, **OPTIONS
        ).best.metric.name
        == "accuracy"
    )


def test_its_model_predicts_and_is_exported(tmp_path: Path) -> None:
    result = fl.run("fedavg", task(), directory=tmp_path, **OPTIONS)
    inputs = task().test.inputs[:20]
    loaded = fl.load(tmp_path)
    expected = result.model(inputs).argmax(1).numpy()
    assert np.array_equal(loaded.predict(inputs).astype(int), expected)
    exported = torch.export.load(loaded.export("torch", tmp_path / "model.pt2")).module()(inputs)
    assert np.array_equal(exported.argmax(1).numpy(), expected)


def test_a_site_has_it_too_and_imports_nothing_that_only_the_server_names(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "own.npz", inputs=np.zeros((30, 1, 8, 8), np.float32), labels=np.arange(30) % 10
    )
    words = {"data": DataAgreement.of(make_dataset("digits")).words()}
    text = (
        f"objective = '{PATH}'\nmetrics = ['accuracy']\nalgorithm = 'fedavg'\n[data]\nname "
        "= 'digits'\nclients = 2"
    )
    owner = {
        "partition-id": 0,
        "num-partitions": 2,
        "memory": str(tmp_path),
        "data": str(tmp_path / "own.npz"),
    }
    site = Site.of({"configuration": text, "output": str(tmp_path)}, owner)
    assert site.state.task(words, 0).objective == Classification(criterion=focal)
    words["data"]["objective"] = "classification(criterion='shutil:rmtree')"
    with pytest.raises(RefusedReply):
        DataAgreement.read(words["data"])


def test_metrics_that_are_recorded_anyway_may_be_named() -> None:
    assert figures(fl.run("fedavg", task(None, ["accuracy", "loss"]), **OPTIONS)) == figures(
        fl.run("fedavg", task(None, ()), **OPTIONS)
    )


def test_a_loss_given_as_a_function_has_no_expression_and_its_path_is_one() -> None:
    assert isinstance(build_objective(focal), Custom)
    assert expression_of(Classification(criterion=focal)) is None
    assert plain(parse_value(PATH)) == PATH


average_loss = torch.zeros(())


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with state that retains the gradient graph of the last batch."""
    global average_loss
    losses = focal(outputs, targets)
    average_loss = 0.9 * average_loss + 0.1 * losses.mean()
    return losses + average_loss


@pytest.mark.parametrize("engine", ["rows", "stacked"])
def test_a_graph_that_is_kept_over_batches_is_told_with_the_remedy(engine: str) -> None:
    with pytest.raises(
        FedloomError, match=r"with the graph of an earlier batch: store value.detach\(\)"
    ) as caught:
        fl.run("fedavg", task(smoothed, training={"batch_size": 20}), engine=engine, **OPTIONS)
    assert "retain_graph" not in str(caught.value)


def regression_data() -> fl.Task:
    return fl.make_task("diabetes", objective=focal, metrics=["accuracy"])


def classes_without_accuracy() -> None:
    samples = TensorDataset(torch.rand(60, 5), torch.arange(60) % 4)
    cross_entropy = nn.CrossEntropyLoss(reduction="none")
    fl.run(
        "fedavg",
        fl.make_task(samples, clients=3, model="logistic", objective=cross_entropy),
        **OPTIONS,
    )


def average(outputs: Tensor, targets: Tensor) -> Tensor:
    return focal(outputs, targets).mean()


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (
            lambda: task("classification(loss=my:loss)"),
            "no parameter 'loss': did you mean 'criterion'",
        ),
        (
            lambda: Classification(0.1, criterion=focal),
            "criterion replaces the cross entropy, so label_smoothing and class_weights have "
            "no effect",
        ),
        (lambda: Classification(criterion=3), "criterion must be .*, not 3"),  # type: ignore[arg-type]
        (
            lambda: task(f"classification(criterion={PATH}l)"),
            "has no 'focall': did you mean 'focal'",
        ),
        (
            lambda: task("classification(criterion=focal)"),
            "criterion 'focal' must be 'package.module:name'",
        ),
        (regression_data, r"needs labels \[n\] of int64, not \[353\] of float32"),
        (
            lambda: fl.run("fedavg", task(average), **OPTIONS),
            r"loss of each sample, \[b\], not \[\] .*reduction='none'",
        ),
        (
            classes_without_accuracy,
            r"Target \d is out of bounds.*; for a loss over classes set metrics=\['accuracy'\]",
        ),
        (lambda: task(nn.CrossEntropyLoss), "not the class CrossEntropyLoss"),
    ],
)
def test_mistakes_are_told_in_one_line(action: Callable[[], Any], text: str) -> None:
    with pytest.raises(FedloomError, match=text) as caught:
        action()
    assert "\n" not in str(caught.value)


def detached(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return losses without gradient."""
    return focal(outputs, targets).detach()


@pytest.mark.parametrize("metrics", [(), ("accuracy",)])
def test_a_loss_without_gradient_is_refused(metrics: tuple[str, ...]) -> None:
    with pytest.raises(FedloomError, match="a loss without gradient: compute the loss with torch"):
        fl.run("fedavg", task(detached, metrics), **OPTIONS)


def test_the_label_that_losses_ignore_is_refused() -> None:
    labels = torch.arange(30) % 3
    labels[4] = -100
    samples = fl.Samples(torch.randn(30, 4), labels)
    with pytest.raises(FedloomError, match="labels contain -100, which PyTorch's losses ignore"):
        fl.Dataset("some", samples, samples)
