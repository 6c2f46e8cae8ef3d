"""Metrics of a trained model on labelled rows, against naive computations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedloom as fl
from fedloom.cli import main
from fedloom.common.errors import DataError, InvalidValue

Floats = np.ndarray[Any, Any]


def rows(
    count: int = 120, classes: tuple[str, ...] = ("ill", "well"), seed: int = 0
) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=count)
    y = draw.normal(size=count)
    rank = np.digitize(x + y / 2 + draw.normal(size=count), [0.0, 1.0][: len(classes) - 1])
    return pd.DataFrame(
        {
            "x": x,
            "y": y,
            "site": draw.choice(["north", "south", "west"], count),
            "outcome": np.array(classes)[rank],
            "cost": 400 + 30 * x - 20 * y + draw.normal(size=count),
        }
    )


def trained(folder: Path, target: str, **options: Any) -> fl.Predictor:
    frame = rows(**options).drop(columns="cost" if target == "outcome" else "outcome")
    task = fl.make_task(
        frame, target=target, group="site", clients=0, partition="natural", model="logistic"
    )
    fl.run("fedavg", task, rounds=3, participation=1.0, directory=folder, quiet=True)
    return fl.load(folder)


def naive_auc(scores: Floats, is_positive: Floats) -> float:
    """Return the share of pairs of a positive and a negative row in the right order."""
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a in scores[is_positive]
        for b in scores[~is_positive]
    ]
    return sum(pairs) / len(pairs)


def naive(
    labels: Floats, probabilities: Floats, predicted: Floats, positive: int
) -> dict[str, float]:
    count, classes = probabilities.shape
    recalls = [(predicted[labels == k] == k).mean() for k in range(classes) if (labels == k).any()]
    f1 = []
    for k in [positive] if classes == 2 else range(classes):
        hits = ((predicted == k) & (labels == k)).sum()
        f1.append(2 * hits / ((predicted == k).sum() + (labels == k).sum()))
    areas = [
        naive_auc(probabilities[:, k], labels == k)
        for k in ([positive] if classes == 2 else range(classes))
    ]
    error = 0.0
    confidence = probabilities.max(1)
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            right = (probabilities[inside].argmax(1) == labels[inside]).mean()
            error += inside.mean() * abs(right - confidence[inside].mean())
    return {
        "accuracy": float((labels == predicted).mean()),
        "balanced_accuracy": float(np.mean(recalls)),
        "auc": float(np.mean(areas)),
        "f1": float(np.mean(f1)),
        "log_loss": -sum(math.log(probabilities[row, labels[row]]) for row in range(count)) / count,
        "calibration_error": error,
    }


@pytest.mark.parametrize("classes", [("ill", "well"), ("a", "b", "c")])
def test_metrics_of_all_rows_and_of_each_client_are_those_of_naive_code(
    classes: tuple[str, ...], tmp_path: Path
) -> None:
    model = trained(tmp_path, "outcome", classes=classes)
    frame = rows(90, classes, seed=5)
    result = model.evaluate(frame, by="site")
    labels = np.array([classes.index(name) for name in frame.outcome])
    probabilities = model.predict_proba(frame).astype(np.float64)
    predicted = probabilities.argmax(1)
    groups = {"all rows": np.ones(90, bool)}
    groups |= {name: (frame.site == name).to_numpy() for name in ("north", "south", "west")}
    assert list(result.metrics.index) == list(groups)
    for name, of in groups.items():
        expected = naive(labels[of], probabilities[of], predicted[of], 1)
        line = result.metrics.loc[name]
        assert line["rows"] == of.sum()
        for metric, value in expected.items():
            assert line[metric] == pytest.approx(value, rel=1e-5, abs=1e-7), (name, metric)
    assert result.confusion is not None
    for k, true in enumerate(classes):
        for j, other in enumerate(classes):
            assert result.confusion.loc[true, other] == ((labels == k) & (predicted == j)).sum()
    losses = -np.log(probabilities[np.arange(90), labels])
    assert result.worst.row.tolist() == np.argsort(-losses)[:10].tolist()
    assert result.worst.true.tolist() == frame.outcome[result.worst.row].tolist()
    assert result.worst.predicted.tolist() == model.predict(frame)[result.worst.row].tolist()
    assert "x" not in result.worst  # no cell of a row but its answer


def test_a_threshold_is_applied_as_given_or_chosen_by_f1(tmp_path: Path) -> None:
    model = trained(tmp_path, "outcome")
    frame = rows(90, seed=5)
    is_ill = (frame.outcome == "ill").to_numpy()
    share = model.predict_proba(frame)[:, 0].astype(np.float64)

    def f1(threshold: float) -> float:
        chosen = share >= threshold
        return float(2 * (chosen & is_ill).sum() / (chosen.sum() + is_ill.sum()))

    given = model.evaluate(frame, positive="ill", threshold=0.3, metrics=["f1", "auc"])
    assert given.metrics.loc["all rows", "f1"] == pytest.approx(f1(0.3))
    assert given.metrics.loc["all rows", "auc"] == pytest.approx(naive_auc(share, is_ill))
    assert list(given.metrics.columns) == ["rows", "f1", "auc"]
    best = model.evaluate(frame, positive="ill", threshold="best_f1")
    assert best.metrics.loc["all rows", "f1"] == pytest.approx(max(map(f1, share)))
    assert best.threshold == pytest.approx(max(share, key=f1), rel=1e-5)
    assert "best F1 on these rows" in " ".join(best.notes)


def test_numbers_are_rated_in_the_units_of_the_target(tmp_path: Path) -> None:
    model = trained(tmp_path, "cost")
    frame = rows(60, seed=3)
    result = model.evaluate(frame, by="site")
    error = model.predict(frame).astype(np.float64) - frame.cost.to_numpy()
    spread = frame.cost.to_numpy() - frame.cost.mean()
    line = result.metrics.loc["all rows"]
    assert line.rmse == pytest.approx(math.sqrt((error**2).mean()), rel=1e-5)
    assert line.mae == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert line.r2 == pytest.approx(1 - (error**2).sum() / (spread**2).sum(), rel=1e-4)
    assert result.confusion is None
    assert result.worst.row.tolist() == np.argsort(-(error**2))[:10].tolist()


def test_a_metric_that_rows_do_not_define_is_empty(tmp_path: Path) -> None:
    model = trained(tmp_path, "outcome")
    frame = rows(40, seed=3).assign(site="north")
    frame.loc[frame.outcome == "ill", "site"] = "south"
    result = model.evaluate(frame, by="site")
    assert math.isnan(result.metrics.loc["north", "auc"])
    assert "NaN" not in json.dumps(result.as_json())
    assert "nan" not in repr(result).lower()


def test_the_command_prints_and_writes_the_metrics_of_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained(tmp_path / "run", "outcome")
    frame = rows(90, seed=5)
    frame.to_csv(tmp_path / "new.csv", index=False)
    words = ["evaluate", str(tmp_path / "run"), str(tmp_path / "new.csv"), "--by", "site"]
    words += ["--threshold", "best-f1", "--worst", "3"]
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    assert main([*words, *files]) == 0
    shown = capsys.readouterr().out
    expected = model.evaluate(frame, by="site", threshold="best_f1", worst=3)
    assert repr(expected) in shown
    written = json.loads((tmp_path / "a.json").read_text())
    assert len(written["worst"]) == 3
    assert [line["client"] for line in written["metrics"]] == ["all rows", "north", "south", "west"]
    read = pd.read_csv(tmp_path / "a.csv", index_col="client")
    assert np.allclose(read, expected.metrics)
    assert "<table" in expected._repr_html_()
    assert main([*words[:3], "--metrics", "aucc"]) == 2
    assert "auc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"by": "sites"}, "by: no column 'sites': did you mean 'site'"),
        ({"metrics": ["aucc"]}, "metrics 'aucc' is not allowed.*auc"),
        ({"metrics": ["rmse"]}, "metrics 'rmse' is not allowed"),
        ({"positive": "sick"}, "positive 'sick' is not allowed .*ill, well"),
        ({"threshold": 2}, "threshold must be between 0 and 1, not 2"),
        ({"threshold": "f1"}, "threshold must be a number or 'best_f1'"),
        ({"labels": [0, 1]}, "40 rows, but 2 labels"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    model = trained(tmp_path, "outcome")
    with pytest.raises((DataError, InvalidValue), match=line) as refused:
        model.evaluate(rows(40), **options)
    assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match="'dead' in row 3, and the model predicts: 'ill', 'well'"):
        model.evaluate(rows(40).assign(outcome=["ill"] * 3 + ["dead"] * 37))


def test_arrays_are_evaluated_with_their_labels(tmp_path: Path) -> None:
    task = fl.make_task("digits", clients=3, partition="iid", model="logistic")
    result = fl.run("fedavg", task, rounds=2, directory=tmp_path, quiet=True)
    model = fl.load(tmp_path)
    judged = model.evaluate(task.test.inputs, task.test.labels, by=["a", "b"] * 182)
    assert judged.metrics.loc["all rows", "accuracy"] == pytest.approx(result.accuracy)
    assert judged.metrics.loc["a", "rows"] == 182
