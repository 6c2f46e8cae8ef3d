"""Objectives compared with plain loops in each engine.

Also tests data, models and metrics that do not match an objective.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedloom as fl
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.flat.layout import Layout
from fedloom.objectives import Objective, objectives, prediction
from fedloom.objectives.classification import CLASSIFICATION, Classification
from fedloom.objectives.custom import Custom, build_objective, expression_of
from fedloom.objectives.metrics import build_metrics, counted, require_defined
from fedloom.objectives.metrics import figures as figures_of
from fedloom.objectives.multilabel import Multilabel
from fedloom.objectives.regression import Regression
from fedloom.objectives.sequence import NextToken, Segmentation
from fedloom.report.cells import best_cells
from fedloom.report.sheet import Sheet
from fedloom.report.summary import best, rounds_to
from fedloom.rounds.scoring import Evaluator, Tally
from fedloom.runs.config_file import configuration
from fedloom.runs.configured import run_configured
from fedloom.runs.events import Event, RunName
from fedloom.study.comparison import Comparison
from fedloom.study.pools import SerialPool
from fedloom.study.search import Search, best_of
from fedloom.study.stored_runs import read_runs
from fedloom.study.trials import run_trials
from objective_support import KINDS, absolute, draw, make, median_error

# --- plain loops over samples and numbers ---


def losses(kind: str, output: Tensor, target: Tensor) -> list[tuple[float, float]]:
    """Return (loss, weight) of each label, token or pixel of one sample that counts."""
    if kind == "classification":
        weights, probability = [1.0, 2.0, 0.5], output.double().softmax(0)
        soft = [0.1 / 3 + (0.9 if c == int(target) else 0.0) for c in range(3)]
        value = -sum(weights[c] * soft[c] * math.log(float(probability[c])) for c in range(3))
        return [(value, weights[int(target)])]
    if kind == "multilabel":
        chances = output.double().sigmoid().tolist()
        return [
            (-math.log(p if t == 1 else 1 - p), 1.0)
            for p, t in zip(chances, target.tolist(), strict=True)
        ]
    if kind == "sequence":
        rows = zip(output.double(), target.tolist(), strict=True)
        return [(-math.log(float(row.softmax(0)[t])), 1.0) for row, t in rows if t != -100]
    if kind == "segmentation":
        pixels = zip(output.double().flatten(1).T, target.flatten().tolist(), strict=True)
        return [(-math.log(float(pixel.softmax(0)[t])), 1.0) for pixel, t in pixels if t != 255]
    errors = [abs(float(a) - float(b)) for a, b in zip(output, target, strict=True)]
    if kind == "squared":
        return [(e * e, 1.0) for e in errors]
    if kind == "huber":
        return [(e * e / 2 if e <= 1 else e - 0.5, 1.0) for e in errors]
    return [(e, 1.0) for e in errors]


def naive_loss(kind: str, outputs: Tensor, targets: Tensor) -> float:
    pairs = [
        pair
        for output, target in zip(outputs, targets, strict=True)
        for pair in losses(kind, output, target)
    ]
    return sum(value for value, _ in pairs) / sum(weight for _, weight in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_reported_loss_equal_plain_loops(kind: str) -> None:
    samples, model, objective, _ = draw(kind)
    outputs = model(samples.inputs)
    expected = naive_loss(kind, prediction(outputs).detach(), samples.labels)
    assert float(objective.loss(outputs, samples.labels).detach()) == pytest.approx(
        expected, rel=1e-5
    )
    task = make(kind)
    result = fl.run("fedavg", task, rounds=1, participation=1.0)
    module = result.model
    trained = prediction(module(task.test.inputs)).detach()
    assert result.history[-1]["loss"] == pytest.approx(
        naive_loss(kind, trained, task.test.labels), rel=1e-5
    )


def figures(objective: Objective, outputs: Any, targets: Tensor) -> dict[str, float]:
    counted = objective.statistics(outputs, targets)
    assert {name: tuple(values.shape[1:]) for name, values in counted.items()} == objective.shapes(
        prediction(outputs).shape[-1] if prediction(outputs).dim() == 2 else 3
    )
    counts = {name: values.double() for name, values in counted.items()}
    totals = objective.add_up(counts, lambda values: values.sum(0, keepdim=True))
    values = objective.figures({**totals, "samples": torch.tensor([float(len(targets))])})
    return {name: float(value) for name, value in values.items()}


def test_figures_of_classes() -> None:
    outputs = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
    values = figures(Classification(top_k=2), outputs, torch.tensor([0, 2, 0, 1]))
    assert (values["accuracy"], values["top_2"]) == (1 / 4, 2 / 4)


def test_figures_of_several_labels() -> None:
    outputs = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]])
    targets = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    # 2 correct, 1 false positive, 1 false negative; the third class has no true positive
    values = figures(Multilabel(), outputs, targets)
    assert values["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert values["f1_macro"] == pytest.approx((1 + 1 + 0) / 3)
    assert values["exact"] == pytest.approx(1 / 3)


def test_figures_of_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, targets = (
        torch.randn(9, 2, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    values = figures(Regression(), outputs, targets)
    error = outputs - targets
    assert values["rmse"] == pytest.approx(float(error.square().mean().sqrt()))
    assert values["mae"] == pytest.approx(float(error.abs().mean()))
    spread = (targets - targets.mean(0)).square().sum(0)
    assert values["r2"] == pytest.approx(float((1 - error.square().sum(0) / spread).mean()))


def test_figures_of_tokens_leave_padding_out() -> None:
    outputs = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]]])
    values = figures(NextToken(padding=-1), outputs, torch.tensor([[0, 0, -1]]))
    loss = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2
    assert values["accuracy"] == 1 / 2
    assert values["perplexity"] == pytest.approx(math.exp(loss))


def test_figures_of_pixels_leave_out_ignored_ones() -> None:
    classes = torch.tensor([[[0, 1, 1], [2, 2, 0]]])
    targets = torch.tensor([[[0, 1, 2], [2, 255, 255]]])
    outputs = F.one_hot(classes, 3).permute(0, 3, 1, 2).float()
    values = figures(Segmentation(), outputs, targets)
    assert values["accuracy"] == 3 / 4
    assert values["miou"] == pytest.approx((1 / 1 + 1 / 2 + 1 / 2) / 3)


def test_ignored_pixels_count_nowhere_even_if_the_ignored_label_is_a_class() -> None:
    generator = torch.Generator().manual_seed(2)
    outputs = torch.randn(4, 3, 8, 8, generator=generator)
    targets = torch.randint(3, (4, 8, 8), generator=generator)
    predicted, counted = outputs.argmax(1), targets != 1
    pairs = [(predicted[counted] == c, targets[counted] == c) for c in range(3)]
    ious = [float((a & b).sum() / (a | b).sum()) for a, b in pairs]
    assert ious[1] == 0
    values = figures(Segmentation(ignore=1), outputs, targets)
    assert values["miou"] == pytest.approx(sum(ious) / 3)
    with_ignore_1 = figures(Segmentation(ignore=1), outputs, torch.where(counted, targets, 1))
    shifted = figures(Segmentation(), outputs, torch.where(counted, targets, 255))
    assert with_ignore_1 == shifted == values


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("centre", [0.0, 1e6, -3e8])
def test_r2_does_not_cancel_where_targets_are_far_from_0(centre: float, clients: int) -> None:
    generator = torch.Generator().manual_seed(1)
    targets = centre + 0.01 * torch.randn(90, 2, generator=generator, dtype=torch.float64)
    outputs = targets + 0.004 * torch.randn(90, 2, generator=generator, dtype=torch.float64)
    exact = targets - targets[0]
    spread = (exact - exact.mean(0)).square().sum(0)
    expected = (1 - (outputs - targets).square().sum(0) / spread).mean()
    assert 0.7 < float(expected) < 0.9
    assert _pooled_r2(outputs, targets, clients) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("value", [0.1, 1e6 + 1 / 3, 1e-300, -1 / 7])
def test_r2_of_a_constant_column_is_0(value: float, clients: int) -> None:
    targets = torch.full((900, 1), value, dtype=torch.float64)
    outputs = targets + torch.linspace(-1, 1, 900, dtype=torch.float64).unsqueeze(1)
    assert _pooled_r2(outputs, targets, clients) == 0


def _pooled_r2(outputs: Tensor, targets: Tensor, clients: int) -> float:
    """Return r2 from separate counts of clients of unequal size."""
    data = Dataset(
        "far", Samples(outputs, targets), Samples(outputs, targets), objective=Regression()
    )
    cuts = [0, *(len(targets) * k * k // clients**2 for k in range(1, clients)), len(targets)]
    partition = Partition.of([torch.arange(start, end).numpy() for start, end in pairwise(cuts)])
    evaluator = Evaluator(nn.Identity(), Layout(nn.Linear(1, 1)), data)
    evaluator.batch_size = 7
    evaluator.__dict__["module"] = nn.Identity()
    evaluator.layout.load = lambda module, row, integers: None  # type: ignore[method-assign]
    tally = evaluator.tally(torch.zeros(2), data.test, partition, range(clients))
    per_client = Tally.joined(
        [evaluator.tally(torch.zeros(2), data.test, partition, [k]) for k in range(clients)]
    )
    overall = tally.overall(data.objective)["r2"]
    assert per_client.overall(data.objective)["r2"] == pytest.approx(overall, rel=1e-9)
    assert evaluator.score(torch.zeros(2), data.test)["r2"] == pytest.approx(overall, rel=1e-5)
    return overall


# --- training ---


def row(result: fl.Result) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in result.model.parameters()])


def test_weighted_and_smoothed_classes_are_those_of_pytorch() -> None:
    samples, model, objective, _ = draw("classification")
    logits = model(samples.inputs)
    expected = F.cross_entropy(
        logits, samples.labels, torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1
    )
    assert torch.allclose(objective.loss(logits, samples.labels), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_trains_as_plain_torch_does(kind: str) -> None:
    """Training equals plain torch. One batch of all samples makes their order irrelevant."""
    samples, model, objective, classes = draw(kind)
    data = Dataset(
        kind, samples, samples[:0], classes, vocabulary=5 if kind == "sequence" else None, objective=objective,
        standardise=False,
    )  # fmt: skip
    training = fl.Training(
        learning_rate=0.2, weight_decay=0.01, momentum=0.9, batch_size=None, epochs=3
    )
    task = fl.make_task(data, clients=1, partition="iid", model=model, training=training)
    result = fl.run("fedavg", task, rounds=1, participation=1.0).model
    plain = task.module(task.initial)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, weight_decay=0.01, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        objective.loss(plain(samples.inputs), samples.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for trained, expected in zip(result.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(trained, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["multilabel", "sequence", "huber"])
def test_a_lengthened_run_equals_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    uninterrupted = fl.run("fedmr", make(kind), rounds=4, participation=1.0)
    fl.run("fedmr", make(kind), rounds=2, participation=1.0, directory=tmp_path / "run")
    resumed = fl.run("fedmr", make(kind), rounds=4, participation=1.0, directory=tmp_path / "run")
    assert torch.equal(row(resumed), row(uninterrupted))
    assert resumed.history[-1]["loss"] == uninterrupted.history[-1]["loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_clients_are_scored_separately(kind: str) -> None:
    samples, model, objective, classes = draw(kind)
    vocabulary = 5 if kind == "sequence" else None
    data = Dataset(
        kind, samples[:40], samples[40:], classes, vocabulary=vocabulary, objective=objective
    )
    training = fl.Training(learning_rate=0.05, batch_size=5)
    task = fl.make_task(
        data, clients=4, partition="iid", model=model, training=training, local_test=0.25
    )
    result = fl.run("ditto", task, rounds=2, participation=1.0, personal_every=1)
    record, name = result.history[-1], task.objective.metric.name
    assert {
        f"personal_{name}",
        f"personal_{name}_std",
        f"personal_{name}_worst",
        "personal_loss",
    } <= record.keys()
    assert record[f"personal_{name}_std"] > 0
    worse, better = sorted((record[f"personal_{name}_worst"], record[f"personal_{name}"]))
    assert (
        worse == record[f"personal_{name}_worst"]
    ) == objective.metric.higher_is_better or worse == better


# --- names ---


@pytest.mark.parametrize(
    "objective",
    [
        Classification(label_smoothing=0.1, class_weights=(1.0, 2.5)),
        Regression("huber", 2.0),
        Multilabel(),
        NextToken(padding=0),
        Segmentation(),
    ],
)
def test_objective_expressions_round_trip(objective: Objective) -> None:
    expression = expression_of(objective)
    assert expression is not None
    assert build_objective(expression) == objective


def test_a_function_is_named_by_its_import_path() -> None:
    assert expression_of(Custom(absolute)) is None
    assert build_objective(f"{absolute.__module__}:absolute") == Custom(absolute)
    assert {entry.name for entry in objectives} == {
        "classification", "multilabel", "regression", "segmentation", "sequence",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (
            lambda: build_objective("regresion"),
            "unknown objective 'regresion': did you mean 'regression'?",
        ),
        (lambda: build_objective("regression(kind=cubed)"), "kind must be"),
        (lambda: build_objective("no_such_module:loss"), "objective 'no_such_module:loss'"),
        (lambda: Classification(class_weights=(0.0, 0.0)), "class_weights are all 0"),
        (
            lambda: Dataset("d", *_parts(torch.zeros(4)), 2),
            "needs labels [n] of int64, not [3] of float32",
        ),
        (
            lambda: Dataset("d", *_parts(torch.zeros(4).long()), objective=Regression()),
            "not [3] of int64",
        ),
        (
            lambda: Dataset("d", *_parts(torch.full((4,), torch.nan)), objective=Regression()),
            "NaN or infinite",
        ),
        (
            lambda: Dataset("d", *_parts(torch.full((4, 2), 2.0)), objective=Multilabel()),
            "of 0 and 1",
        ),
        (
            lambda: prediction({"scores": torch.zeros(1)}),
            "the model returned a dictionary of scores",
        ),
    ],
)
def test_labels_and_options_that_do_not_fit_are_refused_in_one_line(
    make_it: Callable[[], Any], words: str
) -> None:
    with pytest.raises(FedloomError) as caught:
        make_it()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def _parts(labels: Tensor) -> tuple[Samples, Samples]:
    samples = Samples(torch.zeros(4, 2), labels)
    return samples[:3], samples[3:]


def test_methods_and_recorders_that_need_classes_are_refused_before_the_run() -> None:
    task = make("squared")
    with pytest.raises(InvalidValue, match="fedgen needs class labels"):
        fl.run("fedgen", task, rounds=1)
    with pytest.raises(
        InvalidValue, match="memorisation: the targets of 'squared' are not classes"
    ):
        fl.run("fedavg", task, rounds=1, record=["memorisation"])
    with pytest.raises(
        InvalidValue, match=r"label_noise='symmetric.0.4.': the targets of squared are not classes"
    ):
        make("squared", label_noise="symmetric(0.4)")


# --- reports, search and targets follow the metric ---


def job(folder: Path, **keys: Any) -> dict[str, Any]:
    return {
        "rounds": 8,
        "participation": 1.0,
        "evaluate_every": 1,
        "model": "logistic",
        "directory": str(folder),
        "data": {"name": "diabetes", "clients": 5, "partition": "iid", "local_test": 0.25},
        "training": {"learning_rate": 0.05, "epochs": 3, "batch_size": 20},
        **keys,
    }


def test_a_comparison_follows_a_metric_of_which_less_is_better(tmp_path: Path) -> None:
    events: list[Event] = []
    methods = ["fedprox(mu=50.0)", "fedavg"]
    table = job(
        tmp_path,
        algorithms=methods,
        seeds=[0, 1],
        targets=[0.85, "loss <= 0.3", "nobodys >= 1"],
        personal_every=4,
        workers=1,
        engine="stacked",
    )
    assert Comparison.of(configuration(table)).run(events.append) == {}
    assert {event.score for event in events if event.kind == "ended"} != {""}
    assert [event.text for event in events if event.kind == "notice"] == []
    runs = [run.summary for run in read_runs(tmp_path)]
    comparison = Sheet(runs, [0.85, "loss <= 0.6", "nobodys >= 1"], measure="final")
    near, free = comparison.rows["final"]
    assert near is not None
    assert free is not None
    assert free.mean < near.mean
    assert [(d.method, d.other) for d in comparison.tests["final"]] == [
        ("fedprox(mu=50.0)", "fedavg")
    ]
    for run in runs:
        errors = [record["rmse"] for record in run.records]
        assert best(run) == min(errors)
        assert rounds_to(run, 0.85) == next(
            (k for k, error in enumerate(errors, 1) if error <= 0.85), None
        )
        small = [number for number, record in enumerate(run.records, 1) if record["loss"] <= 0.6]
        assert rounds_to(run, "loss <= 0.6") == (small[0] if small else None)
    reached = ["reached_0.85", "reached_loss <= 0.6", "reached_nobodys >= 1"]
    assert comparison.rows.iloc[1][reached].tolist() == [2, 2, 0]
    titles = [column.title for column in comparison.table.columns]
    never_recorded = comparison.table.iloc[:, titles.index("Rounds to nobodys ≥ 1")]
    assert [cell.text for cell in never_recorded] == ["–", "–"]
    best_final = best_cells(comparison.table).iloc[:, titles.index("Final RMSE")]
    assert best_final.tolist() == [False, True]
    assert {"Rounds to 0.85", "Rounds to loss ≤ 0.6", "Bytes to loss ≤ 0.6", "Clients' own"} <= set(
        titles
    )
    text = (tmp_path / "report.html").read_text()
    conclusion = text.partition("<p class=conclusion>")[2].partition("</p>")[0]
    assert "RMSE" in conclusion
    assert re.search(r"fedavg is \S+ better than fedprox", conclusion)
    assert "Accuracy" not in text.partition("plotly.js v")[0]
    tex = (tmp_path / "comparison.tex").read_text()
    assert "Final RMSE" in tex
    assert "Rounds to loss $\\leq$ 0.3" in tex
    result = json.loads((tmp_path / "fedavg/seed-0/result.json").read_text())
    assert result["best_rmse"] <= result["rmse"]


def test_a_search_takes_the_trial_of_least_error(tmp_path: Path) -> None:
    search = Search(
        job(tmp_path, algorithm="fedavg"), {"training": {"learning_rate": [0.0001, 0.05]}}
    )
    trials = search.grid()
    run_trials(trials, SerialPool(), lambda event: None, lambda: False)
    errors = [trial.spread.mean for trial in trials if trial.spread is not None]
    assert errors[1] < errors[0]
    assert best_of(trials) is trials[1]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"targets": [60.0], "data": {"name": "wine", "clients": 5}},
            "targets: accuracy must be between 0 and 1, not 60",
        ),
        ({"objective": "regresion"}, "objective = 'regresion': unknown objective"),
        ({"objective": "regression", "targets": [-1.0]}, "targets"),
        (
            {"targets": ["los <= 0.2"]},
            "targets: 'los <= 0.2': no 'los' is recorded: did you mean 'loss'?",
        ),
        (
            {"targets": ["loss < 0.2"]},
            "'loss < 0.2' is neither a number nor a figure with its limit",
        ),
        (
            {"targets": ["client_accuracy >= 80"], "data": {"name": "wine", "clients": 5}},
            "targets: client_accuracy must be between 0 and 1",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(FedloomError, match=words):
        configuration(job(tmp_path, algorithm="fedavg", **keys)).task(0)


def test_a_bare_target_is_a_value_of_the_objectives_metric(tmp_path: Path) -> None:
    configured = configuration(job(tmp_path, algorithm="fedavg", rounds=1, targets=[60, 1e-9]))
    run = run_configured(configured, RunName("fedavg", 0), lambda event: None)
    assert [rounds_to(run, target) for target in (*configured.targets, "rmse <= 60")] == [
        1,
        None,
        1,
    ]


def test_a_configuration_names_the_objective(tmp_path: Path) -> None:
    configured = configuration(
        job(tmp_path, algorithm="fedavg", objective="regression(kind=huber)", targets=[60.0])
    )
    assert configured.task(0).objective == Regression("huber")
    assert configured.resolved("fedavg", 0)["objective"] == "regression(kind=huber)"


# --- metrics in addition to the objective's ---


def test_metrics_by_name_are_those_of_scikit_learn_on_the_test_set_and_client_by_client() -> None:
    from sklearn.metrics import f1_score, roc_auc_score

    samples, model, _, _ = draw("classification")
    data = Dataset("classes", samples[:32], samples[32:], 3)
    task = fl.make_task(
        data, clients=4, partition="iid", model=model, local_test=0.5,
        metrics=["f1(average='macro')", "auroc(average='weighted')"],
    )  # fmt: skip
    result = fl.run("fedavg", task, rounds=1, participation=1.0, personal_every=1)
    task.model.eval()

    def judged(inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        with torch.no_grad():
            logits = result.model(inputs)
        f1 = f1_score(labels, logits.argmax(1), average="macro", labels=labels.unique())
        return f1, roc_auc_score(labels, logits.softmax(1), average="weighted", multi_class="ovr")

    record = result.history[-1]
    assert (record["f1_macro"], record["auroc_weighted"]) == pytest.approx(
        judged(task.test.inputs, task.test.labels)
    )
    assert task.local_test is not None
    scores = []
    for indices in task.local_test:
        samples = task.train[torch.from_numpy(indices)]
        present = samples.labels.unique()
        with torch.no_grad():
            logits = result.model(samples.inputs)
        both = torch.cat([present, logits.argmax(1)]).unique()
        scores.append(
            (len(indices), f1_score(samples.labels, logits.argmax(1), average="macro", labels=both))
        )
    mean = sum(size * value for size, value in scores) / sum(size for size, _ in scores)
    assert record["personal_f1_macro"] == record["client_f1_macro"] == pytest.approx(mean)


def test_a_metric_may_be_a_users_function() -> None:
    task = make("squared", metrics=["objective_support:median_error"], local_test=0.25)
    runs = [
        fl.run("fedavg", task, rounds=1, participation=1.0, engine=engine, personal_every=1)
        for engine in ("rows", "stacked")
    ]
    objective = task.objective  # it contains the scale of the target
    outputs, targets = map(
        objective.in_units, (runs[0].model(task.test.inputs).detach(), task.test.labels)
    )
    assert runs[0].history[-1]["median_error"] == pytest.approx(
        float(median_error(outputs, targets)), rel=1e-5
    )
    for name in ("median_error", "personal_median_error", "client_median_error"):
        assert runs[1].history[-1][name] == pytest.approx(runs[0].history[-1][name], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "metric", "words"),
    [
        ("classification", "f1_scor", "unknown metric 'f1_scor': did you mean 'f1_score'?"),
        ("classification", "r2", "unknown metric 'r2'"),
        (
            "classification",
            "f1(averag='macro')",
            "f1 has no option 'averag': did you mean 'average'?",
        ),
        ("classification", "f1(average='macr')", "metrics: \"f1(average='macr')\": "),
        ("classification", "confusion_matrix", "confusion_matrix returned [3, 3], not one number"),
        ("squared", "mean_squared_eror", "did you mean 'mean_squared_error'?"),
        ("sequence", "f1", "only classification, multilabel and regression have metrics by name"),
    ],
)
def test_metrics_that_do_not_fit_are_refused_in_one_line(
    kind: str, metric: str, words: str
) -> None:
    with pytest.raises(FedloomError) as caught:
        make(kind, metrics=[metric])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_metrics_by_name_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.classification", None)
    with pytest.raises(FedloomError, match="metrics by name needs 'torchmetrics': pip install"):
        make("classification", metrics=["f1"])


def test_a_configuration_names_metrics_and_targets_of_them(tmp_path: Path) -> None:
    configured = configuration(
        job(
            tmp_path,
            algorithm="fedavg",
            metrics=["pearson_corrcoef"],
            targets=["pearson_corrcoef >= 0.2"],
        )
    )
    assert [metric.name for metric in configured.task(0).dataset.metrics] == ["pearson_corrcoef"]
    for objective in ("regression", None):  # None: the objective of the data
        with pytest.raises(
            FedloomError, match="unknown metric 'pearson_corcoef': did you mean 'pearson_corrcoef'"
        ):
            configuration(
                job(tmp_path, algorithm="fedavg", objective=objective, metrics=["pearson_corcoef"])
            ).task(0)


def area(scores: Tensor, members: Tensor) -> float:
    """Return the probability that a sample of the class has a higher score than another sample."""
    pairs = scores[members].unsqueeze(1) - scores[~members]
    return float(((pairs > 0).double() + (pairs == 0).double() / 2).mean())


@pytest.mark.parametrize("name", ["auroc", "auroc(average='macro')"])
def test_a_mean_over_classes_leaves_out_those_that_a_client_lacks(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    outputs, targets = torch.randn(40, 6, generator=generator), torch.arange(40) % 3
    (metric,) = build_metrics([name], CLASSIFICATION, 6)
    expected = [area(outputs.softmax(1)[:, k], targets == k) for k in range(3)]
    assert metric.value(outputs, targets) == pytest.approx(sum(expected) / 3, abs=1e-6)
    labels = torch.nn.functional.one_hot(targets, 6)
    (metric,) = build_metrics([name], build_objective("multilabel"), 6)
    expected = [area(outputs[:, k], targets == k) for k in range(3)]
    assert metric.value(outputs, labels.float()) == pytest.approx(sum(expected) / 3, abs=1e-6)


def test_clients_without_a_defined_metric_are_left_out_of_the_mean() -> None:
    """Clients without a value do not affect the mean.

    Three clients have 30, 20 and 10 samples. The last has only one class and thus no ranking.
    """
    generator = torch.Generator().manual_seed(3)
    outputs, targets = torch.randn(60, 2, generator=generator), torch.arange(60) % 2
    targets[50:] = 1
    owner = torch.tensor([0] * 30 + [1] * 20 + [2] * 10)
    metrics = build_metrics(["auroc"], CLASSIFICATION, 2)
    counts = counted(metrics, outputs, targets, owner) | {
        name: values.double()
        for name, values in CLASSIFICATION.statistics(outputs, targets).items()
    }
    totals = {name: values.sum(0, keepdim=True) for name, values in counts.items()}
    figures_of_all = figures_of(CLASSIFICATION, totals | {"samples": torch.tensor([60.0])})
    areas = [area(outputs[owner == k].softmax(1)[:, 1], targets[owner == k] == 1) for k in range(2)]
    expected = (30 * areas[0] + 20 * areas[1]) / 50
    assert float(figures_of_all["auroc"]) == pytest.approx(expected, abs=1e-6)
    assert float(figures_of_all["auroc_defined"]) == pytest.approx(50 / 60)
    assert "auroc_defined" not in figures_of(
        CLASSIFICATION,
        {name: values[:50].sum(0, keepdim=True) for name, values in counts.items()}
        | {"samples": torch.tensor([50.0])},
    )
    with pytest.raises(InvalidValue, match="auroc cannot be defined for 61 of 60 samples"):
        require_defined({"defined/auroc": torch.tensor([61.0])}, 60)
