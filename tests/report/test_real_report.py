"""Figures and report of a small real comparison with all recorders.

Compares them with the files of the runs.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedloom as fl
from fedloom.cli import main
from fedloom.data.partition import Partition
from fedloom.report.clients import worst_first
from fedloom.report.contents import image_figures
from fedloom.report.sheet import ReportOptions, options_of
from fedloom.report.summary import summarise
from fedloom.runs.config_file import configuration
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import folder_name
from fedloom.study.comparison import Comparison
from fedloom.study.comparison_result import read_comparison
from fedloom.study.stored_runs import StoredRun, read_runs
from json_lines import json_lines
from report_support import CHROMIUM, Browser

METHODS = ("fedavg", "fedmr", "ala(fedavg)")
RECORD = [
    "objective(every=2)",
    "ala(client=3)",
    "trajectory(client=4)",
    "similarity",
    "aggregate(every=2)",
]
ROUNDS = 6


def comparison(folder: Path) -> Configuration:
    return configuration(
        {
            "name": "small", "directory": str(folder), "algorithms": list(METHODS), "seeds": [0, 1], "rounds": ROUNDS,
            "participation": 0.7, "evaluate_every": 1, "personal_every": 2, "targets": [0.3], "dropout": 0.1, "threads": 1,
            "model": "logistic", "record": [*RECORD, "landscape(grid=5, samples=50)"],
            "data": {"clients": 6, "partition": "dirichlet(0.5)", "local_test": 0.25},
            "training": {"learning_rate": 0.05, "batch_size": 20},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "small"
    assert (
        Comparison.of(comparison(folder), "fedloom compare small.toml").run(lambda event: None)
        == {}
    )
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[StoredRun]:
    return read_runs(folder)


@pytest.fixture(scope="module")
def figures(runs: list[StoredRun]) -> dict[str, Any]:
    return {
        slot.name: next(iter(slot.variants.values()))
        for slot in image_figures([run.summary for run in runs])
    }


def run_folder(folder: Path, method: str, seed: int = 0) -> Path:
    return folder / folder_name(method) / f"seed-{seed}"


def recording(folder: Path, method: str, kind: str, seed: int = 0) -> dict[str, Any]:
    entries = json.loads((run_folder(folder, method, seed) / "recording.json").read_text())
    return next(entry for entry in entries if entry["kind"] == kind)


def test_every_figure_is_there(figures: dict[str, Any]) -> None:
    names = {folder_name(method) for method in METHODS}
    expected = {"seeds", "labels", "objective", "similarity", "landscape-cuts"}
    expected |= {
        f"curve-{m}"
        for m in ("accuracy", "loss", "training_loss", "personal_accuracy", "client_accuracy")
    }
    expected |= {"curve-pool_cosine", "ala-3-ala-fedavg"}
    expected |= {
        f"{kind}-{name}"
        for name in names
        for kind in ("local-accuracy", "local-loss", "landscape", "trajectory-4")
    }
    assert {name for name in figures if not name.startswith("other-")} == expected
    assert all(figure.data for figure in figures.values())


def test_curves_are_the_means_over_seeds_of_what_was_measured(
    folder: Path, figures: dict[str, Any]
) -> None:
    for measure in ("accuracy", "loss"):
        drawn = [trace for trace in figures[f"curve-{measure}"].data if trace.hoverinfo != "skip"]
        assert [trace.legendgroup for trace in drawn] == list(METHODS)
        for trace in drawn:
            both = [
                json_lines(run_folder(folder, trace.legendgroup, seed) / "metrics.jsonl")
                for seed in (0, 1)
            ]
            pairs = [[line[measure] for line in records] for records in zip(*both, strict=True)]
            assert list(trace.y) == pytest.approx(
                [statistics.mean(pair) for pair in pairs], rel=1e-6
            )
            assert list(trace.customdata) == pytest.approx(
                [statistics.stdev(pair) for pair in pairs], rel=1e-5, abs=1e-9
            )


def test_bubbles_are_the_labels_that_the_clients_hold(
    folder: Path, figures: dict[str, Any]
) -> None:
    labels = fl.make_task("digits", clients=6).dataset.train.labels.numpy()
    split = Partition.load(run_folder(folder, "fedavg") / "split.npz")
    expected = {
        (str(client), str(label)): int(count)
        for client in range(6)
        for label, count in enumerate(np.bincount(labels[split[client]], minlength=10))
        if count
    }
    (bubbles,) = figures["labels"].data
    assert (
        dict(zip(zip(bubbles.x, bubbles.y, strict=True), bubbles.marker["size"], strict=True))
        == expected
    )


def test_similarity_is_the_mean_over_seeds_of_what_was_noted(
    folder: Path, figures: dict[str, Any]
) -> None:
    drawn = {trace.name: trace for trace in figures["similarity"].data if trace.hoverinfo != "skip"}
    assert list(drawn) == [*METHODS, "fedmr, pool"]
    for name, trace in drawn.items():
        method, key = (
            name.removesuffix(", pool"),
            "pool" if name.endswith(", pool") else "uploaded",
        )
        both = [recording(folder, method, "similarity", seed) for seed in (0, 1)]
        series = [dict(zip(entry["rounds"], entry[key], strict=True)) for entry in both]
        common = sorted(series[0].keys() & series[1].keys())
        assert list(trace.x) == common
        assert list(trace.y) == pytest.approx(
            [(series[0][n] + series[1][n]) / 2 for n in common], rel=1e-6
        )
    assert drawn["fedmr, pool"].line.dash == "dot"
    assert drawn["fedmr, pool"].line.color == drawn["fedmr"].line.color


def test_local_models_stand_beside_the_global_one_that_the_run_measured(
    folder: Path, figures: dict[str, Any]
) -> None:
    for method in METHODS:
        measured = {
            line["round"]: line for line in json_lines(run_folder(folder, method) / "metrics.jsonl")
        }
        for measure in ("accuracy", "loss"):
            *thin, thick = figures[f"local-{measure}-{folder_name(method)}"].data
            assert list(thick.x) == [2, 4, 6]
            assert list(thick.y) == [measured[number][measure] for number in (2, 4, 6)]
            assert len(thin) == len(recording(folder, method, "aggregate")["slots"]) > 1
    ends = {figures[f"local-loss-{folder_name(method)}"].layout.yaxis.range for method in METHODS}
    assert len(ends) == 1  # one scale for all figures


def test_landscapes_have_one_scale_and_the_models_own_loss_in_the_middle(
    folder: Path, figures: dict[str, Any]
) -> None:
    surfaces = [figures[f"landscape-{folder_name(method)}"].data[0] for method in METHODS]
    assert (
        len({(c.contours.start, c.contours.end, c.contours.size, c.x, c.y) for c in surfaces}) == 1
    )
    data = fl.make_task("digits", clients=6).dataset
    for trace in surfaces:
        partition = Partition.load(run_folder(folder, trace.legendgroup) / "split.npz")
        pool = sorted(partition.indices.tolist())
        index = torch.tensor([pool[round(k * (len(pool) - 1) / 49)] for k in range(50)])
        with torch.no_grad():
            logits = fl.load_model(run_folder(folder, trace.legendgroup))(
                data.prepare(data.train.inputs[index])
            )
        loss = float(F.cross_entropy(logits, data.train.labels[index]))
        assert 10 ** trace.z[2][2] == pytest.approx(loss, rel=1e-5)
    cuts = figures["landscape-cuts"].data
    assert [(trace.legendgroup, trace.line.dash) for trace in cuts] == [
        (m, d) for m in METHODS for d in ("solid", "dot")
    ]
    assert list(cuts[0].y) == pytest.approx([10**z for z in surfaces[0].z[2]], rel=1e-9)


def test_costs_are_the_sums_over_all_rounds(folder: Path, runs: list[StoredRun]) -> None:
    row = summarise([run.summary for run in runs if run.summary.algorithm == "fedavg"]).iloc[0]
    for key in ("bytes_down", "bytes_up"):
        spread = row[key]
        totals = [
            sum(x[key] for x in json_lines(run_folder(folder, "fedavg", k) / "metrics.jsonl"))
            for k in (0, 1)
        ]
        assert spread is not None
        assert spread.mean == pytest.approx(statistics.mean(totals))
    seconds = [
        math.fsum(
            x["seconds"] for x in json_lines(run_folder(folder, "fedavg", k) / "timings.jsonl")
        )
        for k in (0, 1)
    ]
    assert row.seconds is not None
    assert row.seconds.mean == pytest.approx(statistics.mean(seconds))


def test_the_objective_is_drawn_as_the_mean_of_what_the_seeds_noted(
    runs: list[StoredRun], figures: dict[str, Any]
) -> None:
    drawn = [
        trace
        for trace in figures["objective"].data
        if trace.legendgroup == "fedmr" and trace.hoverinfo != "skip"
    ]
    summaries = [run.summary for run in runs if run.summary.algorithm == "fedmr"]
    seeds = [
        entry for summary in summaries for entry in summary.recorded if entry["kind"] == "objective"
    ]
    assert len(seeds) == 2
    for trace, key in zip(drawn, ("before", "after"), strict=True):
        assert list(trace.y) == pytest.approx(
            [sum(pair) / 2 for pair in zip(*(entry[key] for entry in seeds), strict=True)]
        )


def test_the_clients_come_worst_first(folder: Path, runs: list[StoredRun]) -> None:
    records = [
        json_lines(run_folder(folder, method) / "clients.jsonl")[-1]["personal"]
        for method in METHODS
    ]
    means = {
        client: statistics.mean(
            dict(zip(record["clients"], record["accuracy"], strict=True))[client]
            for record in records
        )
        for client in records[0]["clients"]
    }
    accuracies, scores = worst_first([run.summary for run in runs])
    assert list(scores) == pytest.approx(sorted(means.values()))
    assert set(accuracies.index) == set(scores.index) == set(means)
    accuracies, scores = worst_first(
        [run.summary for run in runs if run.summary.algorithm == "fedmr"]
    )
    assert list(scores) == sorted(records[1]["accuracy"])
    assert set(accuracies) == {"Global model", "Own model"}


def test_a_report_is_written_anew_from_what_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert options_of(folder / "report.html") == ReportOptions(
        "small", (0.3,), "fedloom compare small.toml", measure="personal"
    )
    text = (folder / "report.html").read_text()
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == text
    assert main(["report", str(run_folder(folder, "fedmr"))]) == 0
    options = options_of(run_folder(folder, "fedmr") / "report.html")
    assert options is not None
    assert options.title == "fedmr, seed 0"
    assert capsys.readouterr().out.count("report: ") == 2


def test_a_landscape_can_be_had_later(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def recorded(method: str) -> dict[str, Any]:
        summary = next(
            run.summary for run in read_runs(folder) if run.path == run_folder(folder, method)
        )
        (entry,) = [entry for entry in summary.recorded if entry["kind"] == "landscape"]
        return entry

    assert (
        main(["report", str(folder), "--record", "landscape(grid=3, data=test, samples=20)"]) == 0
    )
    lines_written = capsys.readouterr().err.splitlines()
    assert lines_written == [f"loss landscape of {method}, seed 0" for method in METHODS]
    assert [recorded(method)["data"] for method in METHODS] == ["test"] * 3
    page = (folder / "report.html").read_text()
    assert {f'<div id="landscape-{folder_name(method)}"' in page for method in METHODS} == {True}
    assert (
        main(
            [
                "report",
                str(run_folder(folder, METHODS[2])),
                "--record",
                "landscape(grid=3)",
                "--quiet",
            ]
        )
        == 0
    )
    assert (recorded(METHODS[2])["data"], capsys.readouterr().err) == ("train", "")
    for method in METHODS:
        (run_folder(folder, method) / "landscape.json").unlink()
        assert len(recorded(method)["x"]) == 5  # the recording of the run itself
    assert main(["report", str(folder)]) == 0


def test_a_task_of_ones_own_has_no_landscape_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = fl.make_task("digits", clients=3, partition="iid", model="logistic")
    fl.run("fedavg", task, rounds=1, directory=tmp_path / "mine")
    assert main(["report", str(tmp_path / "mine"), "--record", "landscape"]) == 2
    assert "its task cannot be made again" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path (Debian's package: chromium)")
def test_the_page_draws_all_of_it_in_a_browser(folder: Path, tmp_path: Path) -> None:
    summaries = [run.summary for run in read_comparison(folder).with_trajectories()]
    with Browser(tmp_path / "profile") as browser:
        browser.open(folder / "report.html")
        browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        browser.run("new Promise(done => setTimeout(done, 2000))")
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
        drawn = set(browser.run("[...document.querySelectorAll('.js-plotly-plot')].map(e => e.id)"))
        assert drawn == {figure.name for figure in image_figures(summaries)}
        numbers = (
            "[...document.querySelectorAll('.clients tbody tr')].map(r => "
            "Number(r.cells[1].dataset.value))"
        )
        scores = browser.run(numbers)
        assert scores == sorted(scores)
        browser.run("document.querySelector('.clients th:nth-child(2) button').click()")
        browser.run("document.querySelector('.clients th:nth-child(2) button').click()")
        assert browser.run(numbers) == sorted(scores, reverse=True)
        browser.run("document.querySelector('.chip[data-method=\"fedmr\"]').click()")
        shown = (
            "[...new Set(document.getElementById('similarity').data.filter(t => "
            "t.visible).map(t => t.legendgroup))]"
        )
        assert browser.run(shown) == ["fedavg", "ala(fedavg)"]
        assert browser.errors == []
