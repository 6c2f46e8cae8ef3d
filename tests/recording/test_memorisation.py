"""Memorisation recorder and its figure.

Compares accuracy on correct and incorrect labels with plain loops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.common.errors import FedloomError
from fedloom.recording.recorder import build_recorders, expression
from fedloom.report.page import render
from fedloom.report.recorded import recorded_figures
from fedloom.report.summary import RunSummary
from fedloom.runs.directory import RunDirectory
from fedloom.task import Task

RUN: dict[str, Any] = {"participation": 0.5, "seed": 2, "record": ["memorisation(every=2)"]}


def noisy_task(label_noise: str, seed: int = 2) -> Task:
    return fl.make_task(
        "digits",
        clients=6,
        partition="dirichlet(1.0)",
        model="mlp(hidden=[16])",
        label_noise=label_noise,
        local_test=0.25,
        training={"learning_rate": 0.2, "epochs": 3},
        seed=seed,
    )


def naive(task: Task, model: torch.nn.Module, clients: list[int]) -> dict[str, Any]:
    """Score the model on true and noisy labels, one sample at a time."""
    assert task.true_labels is not None
    hits: dict[str, list[bool]] = {"right": [], "memorised": [], "corrected": []}
    for client in clients:
        for index in task.partition[client].tolist():
            with torch.no_grad():
                predicted = int(model(task.train.inputs[index : index + 1]).argmax())
            label, true = int(task.train.labels[index]), int(task.true_labels[index])
            if label == true:
                hits["right"].append(predicted == label)
            else:
                hits["memorised"].append(predicted == label)
                hits["corrected"].append(predicted == true)
    shares = {name: [sum(flags) / len(flags)] for name, flags in hits.items()}
    return {"samples": [[len(hits["right"]), len(hits["memorised"])]], **shares}


@pytest.mark.parametrize("method", ["fedavg", "fedmr"])
def test_recordings_equal_plain_loops(method: str) -> None:
    task = noisy_task("symmetric(0.5)")
    result = fl.run(method, task, rounds=2, **RUN)
    (recording,) = result.recorded
    assert recording == {
        "kind": "memorisation",
        "rounds": [2],
        **naive(task, result.model, list(range(6))),
    }
    assert 0 < recording["memorised"][0] < recording["corrected"][0] < 1


def test_samples_of_clients_that_never_train_do_not_count() -> None:
    task = noisy_task("paired(0.5)")
    result = fl.run("fedavg", task, rounds=2, new_clients=0.5, **RUN)
    (recording,) = result.recorded
    trained = [result.federation.numbers[index] for index in range(3)]
    assert recording["samples"] == naive(task, result.model, trained)["samples"]
    assert recording["right"] == naive(task, result.model, trained)["right"]


@pytest.mark.parametrize("noise", ["none", "symmetric(0)"])
def test_without_wrong_labels_there_is_one_curve(noise: str) -> None:
    result = fl.run("fedavg", noisy_task(noise), rounds=4, **RUN)
    (recording,) = result.recorded
    assert list(recording) == ["kind", "rounds", "samples", "right"]
    assert recording["samples"] == [[int(result.task.partition.sizes.sum()), 0]] * 2
    (drawing,) = recorded_figures([result.summary])
    assert "Mislabelled" not in drawing.caption


def test_a_resumed_run_records_the_same(tmp_path: Path) -> None:
    uninterrupted = fl.run("fedmr", noisy_task("symmetric(0.5)"), rounds=6, **RUN)
    fl.run(
        "fedmr",
        noisy_task("symmetric(0.5)"),
        rounds=3,
        directory=tmp_path,
        checkpoint_every=1,
        **RUN,
    )
    resumed = fl.run(
        "fedmr",
        noisy_task("symmetric(0.5)"),
        rounds=6,
        directory=tmp_path,
        checkpoint_every=1,
        **RUN,
    )
    assert resumed.recorded == uninterrupted.recorded
    assert RunDirectory(tmp_path).summary().recorded == uninterrupted.recorded


def test_the_report_draws_a_curve_a_key_and_method_with_a_band_over_seeds() -> None:
    runs: list[RunSummary] = []
    for seed in (2, 3):
        for method in ("fedavg", "fedmr"):
            options = RUN | {"seed": seed}
            runs.append(
                fl.run(method, noisy_task("symmetric(0.5)", seed), rounds=6, **options).summary
            )
    (drawing,) = recorded_figures(runs)
    lines = {trace.name: trace for trace in drawing.variants[""].data if trace.hoverinfo != "skip"}
    endings = {", right": "solid", ", wrong, true label": "dash", ", wrong, as given": "dot"}
    assert {name: line.line.dash for name, line in lines.items()} == {
        f"{method}{ending}": dash
        for method in ("fedavg", "fedmr")
        for ending, dash in endings.items()
    }
    mean = [
        sum(run.recorded[0]["memorised"][k] for run in runs if run.algorithm == runs[0].algorithm)
        / 2
        for k in range(3)
    ]
    assert list(lines["fedavg, wrong, as given"].y) == pytest.approx(mean)
    assert len(drawing.variants[""].data) == 12  # each line has a band
    assert "Mislabelled samples: dashed = true label predicted" in drawing.caption
    page = render("Noise", runs)
    assert "Right and wrong labels" in page


def test_its_expression_round_trips() -> None:
    (built,) = build_recorders(["memorisation(5)"])
    assert expression(built) == "memorisation(every=5)"
    with pytest.raises(FedloomError, match="every must be at least 1, not 0"):
        build_recorders(["memorisation(0)"])
