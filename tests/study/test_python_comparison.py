"""Comparisons in Python: equal to the command, with user objects, and their results."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.common.errors import CheckpointError, InvalidValue
from fedloom.report.summary import mean_of_last
from fedloom.runs.config_file import configuration
from fedloom.runs.directory import folder_name
from fedloom.state.tensors import read_tensors
from fedloom.study.comparison import Comparison
from small_task import small_task

OPTIONS: dict[str, Any] = {
    "rounds": 3,
    "participation": 0.5,
    "evaluate_every": 1,
    "workers": 1,
    "quiet": True,
}

SCRIPT = """\
from dataclasses import dataclass
import torch
import fedloom as fl
from fedloom.algorithm import algorithms

@algorithms.register("slower")
@dataclass
class Slower(fl.Algorithm):
    step: float = 0.5

    def update(self, round, aggregate):
        self.state["model"] = torch.lerp(self.state["model"], aggregate.mean["model"], self.step)

def task(seed):
    return fl.make_task("digits", clients=5, model="mlp(hidden=[4])", seed=seed)

result = fl.compare(
    {"plain": "fedavg", "mine": Slower(step=0.7), "inside": "umf(slower)"}, task, seeds=(0, 1), rounds=2, workers=2,
    directory="runs", quiet=True, participation=0.5
)
assert not result.failed, result.failed
print(sorted({path.path.parent.name for path in result.runs}), len(result.runs))
"""


@dataclass
class Slower(fl.Algorithm):
    step: float = 0.5

    def update(self, round: Any, aggregate: Any) -> None:
        self.state["model"] = torch.lerp(self.state["model"], aggregate.mean["model"], self.step)


METHODS = {"FedAvg": "fedavg", "mine (0.9)": Slower(step=0.9)}


def seeded(seed: int) -> fl.Task:
    return fl.make_task("digits", clients=5, model="mlp(hidden=[4])", seed=seed)


def test_it_makes_the_same_runs_as_the_command(tmp_path: Path) -> None:
    result = fl.compare(
        ["fedavg", "fedmr"], seeded, seeds=range(2), directory=tmp_path / "python", **OPTIONS
    )
    keys = {
        "rounds": 3,
        "participation": 0.5,
        "evaluate_every": 1,
        "seeds": [0, 1],
        "algorithms": ["fedavg", "fedmr"],
    }
    table = {
        **keys,
        "model": "mlp(hidden=[4])",
        "data": {"clients": 5},
        "directory": str(tmp_path / "command"),
    }
    Comparison.of(configuration(table)).run(lambda event: None)
    for run in result.runs:
        reference = tmp_path / "command" / run.path.relative_to(tmp_path / "python")
        for name in ("metrics.jsonl", "split.npz"):
            assert (run.path / name).read_bytes() == (reference / name).read_bytes()
        models = [read_tensors(path / "model.safetensors")[0] for path in (run.path, reference)]
        assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    assert (tmp_path / "python/differences.csv").read_bytes() == (
        tmp_path / "command/differences.csv"
    ).read_bytes()


def test_frames_hold_the_figures_of_single_runs(tmp_path: Path) -> None:
    task = small_task()
    result = fl.compare(
        METHODS, task, seeds=(3, 4), directory=tmp_path, targets=[0.01], last=2, **OPTIONS
    )
    frame, curves = result.frame(), result.curves()
    assert frame[["method", "seed"]].values.tolist() == [
        [name, seed] for seed in (3, 4) for name in METHODS
    ]
    for (_, row), method in zip(frame.iterrows(), [*METHODS.values()] * 2, strict=True):
        run = fl.run(method, task, seed=row["seed"], rounds=3, participation=0.5, evaluate_every=1)
        assert row["accuracy"] == run.accuracy
        assert row["best_accuracy"] == run.best_accuracy
        assert row["mean_of_last"] == np.mean([record["accuracy"] for record in run.history[1:]])
        assert row["rounds_to_0.01"] == run.rounds_to(0.01)
        mine = curves[(curves["method"] == row["method"]) & (curves["seed"] == row["seed"])]
        assert mine["loss"].tolist() == [record["loss"] for record in run.history]
        assert mine["clients"].tolist() == [len(record["clients"]) for record in run.history]
        assert mine["round"].tolist() == [1, 2, 3]
    with pytest.raises(
        InvalidValue,
        match=r"^figure 'los' is not allowed: did you mean 'loss'\? \(allowed: accuracy, ",
    ):
        result.plot("los")
    (difference,) = result.differences().query("measure == 'last'").to_dict("records")
    means = {
        name: [mean_of_last(run.summary, 2) for run in result.runs if run.summary.algorithm == name]
        for name in METHODS
    }
    gaps = np.subtract(means[difference["method"]], means[difference["other"]])
    assert difference["mean"] == pytest.approx(gaps.mean())


def test_a_result_is_shown_plotted_and_read_back(tmp_path: Path) -> None:
    result = fl.compare(METHODS, small_task(), seeds=(3, 4), directory=tmp_path, **OPTIONS)
    assert list(result.table().index) == list(METHODS)
    assert "mine (0.9)" in result.latex()
    assert {trace.name for trace in result.plot("loss").data if trace.name} == set(METHODS)
    assert "<td>mine (0.9)</td>" in result._repr_html_()
    assert repr(result).splitlines()[2].startswith("mine (0.9)")
    assert result.report().read_text().count("mine (0.9)") > 3
    assert (tmp_path / folder_name("mine (0.9)") / "seed-3/result.json").exists()
    stored = fl.read_comparison(tmp_path)
    assert repr(stored) == repr(result)
    assert stored.frame().equals(result.frame())


def test_an_interrupted_comparison_continues_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom.rounds.federation import Federation

    step, steps = Federation.step, [0]

    def counted(self: Federation) -> Any:
        steps[0] += 1
        if steps[0] == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Federation, "step", counted)
    with pytest.raises(KeyboardInterrupt):
        fl.compare(METHODS, small_task(), seeds=(3, 4), directory=tmp_path / "parts", **OPTIONS)
    result = fl.compare(
        METHODS, small_task(), seeds=(3, 4), directory=tmp_path / "parts", **OPTIONS
    )
    assert steps[0] == 5 + 12 - 4  # the interrupted round and all later rounds
    longer = fl.compare(
        METHODS, small_task(), seeds=(3, 4, 5), directory=tmp_path / "parts", **OPTIONS
    )
    assert steps[0] == 5 + 18 - 4
    uninterrupted = fl.compare(
        METHODS, small_task(), seeds=(3, 4, 5), directory=tmp_path / "uninterrupted", **OPTIONS
    )
    timings = ["seconds"]
    assert (
        uninterrupted.curves().drop(columns=timings).equals(longer.curves().drop(columns=timings))
    )
    assert len(result.runs) == 4


def test_a_finished_run_of_other_code_or_data_is_refused(tmp_path: Path) -> None:
    def with_step(step: float) -> type[fl.Algorithm]:
        class Edited(fl.Algorithm):
            def update(self, round: Any, aggregate: Any) -> None:
                self.state["model"] = torch.lerp(self.state["model"], aggregate.mean["model"], step)

        return Edited

    class Edited(fl.Algorithm):
        def update(self, round: Any, aggregate: Any) -> None:
            self.state["model"] = torch.lerp(self.state["model"], aggregate.mean["model"], 0.25)

    options = {**OPTIONS, "directory": tmp_path, "seeds": [0]}
    task = small_task()
    fl.compare({"mine": with_step(0.5)()}, task, **options)
    with pytest.raises(
        CheckpointError, match="seed-0 holds a run of this method with other code: "
    ):
        fl.compare({"mine": Edited()}, small_task(), **options)
    with pytest.raises(CheckpointError, match="a run on other samples"):
        fl.compare({"mine": with_step(0.5)()}, replace(task, test=task.test[1:]), **options)
    fl.compare({"mine": Edited()}, small_task(), fresh=True, **options)


def test_a_script_without_a_main_guard_uses_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "['inside', 'mine', 'plain'] 6\n"


def test_without_a_directory_nothing_is_left() -> None:
    result = fl.compare("fedavg", small_task(), **OPTIONS)
    folder = result.folder
    assert folder.exists()
    del result
    assert not folder.exists()


@pytest.mark.parametrize(
    "refused",
    [partial(fl.compare, "fedavg", rounds=0), partial(fl.tune, "fedprox", search={"mu": []})],
)
def test_a_refused_comparison_or_search_leaves_no_folder(
    refused: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(InvalidValue):
        refused(task=small_task(), quiet=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"methods": {"mine": Slower}}, "expected a method, got a class: give an object"),
        ({"methods": {"mine": "fedavgg"}}, "did you mean 'fedavg'"),
        (
            {"task": "digits"},
            "task must be a Task or a function seed -> Task, not 'digits': see fl.make_task",
        ),
        ({"task": lambda seed: seed}, "task must be a Task or a function seed -> Task, not 0"),
        ({"round": 3}, "unknown key 'round': did you mean 'rounds'"),
        ({"seeds": [0, 0]}, "seeds must differ"),
        ({"seeds": []}, "at least one seed"),
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"targets": [80]}, "targets: accuracy must be"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(change: dict[str, Any], text: str) -> None:
    arguments = {"methods": METHODS, "task": small_task(), **OPTIONS, **change}
    with pytest.raises((InvalidValue, KeyError), match=text) as caught:
        fl.compare(arguments.pop("methods"), arguments.pop("task"), **arguments)
    assert "\n" not in str(caught.value)


def test_labels_of_a_configuration_name_methods_in_tables_and_folders(tmp_path: Path) -> None:
    labels = {"FedAvg": "fedavg", "FedMR (ours)": "fedmr(unit=segment)"}
    table = {
        "algorithms": labels,
        "rounds": 2,
        "seeds": [0, 1],
        "data": {"clients": 5},
        "directory": str(tmp_path),
    }
    comparison = Comparison.of(configuration({**table, "model": "mlp(hidden=[4])"}))
    result = comparison.result(comparison.run(lambda event: None))
    assert list(result.table().index) == list(labels)
    assert "FedMR (ours)" in (tmp_path / "comparison.tex").read_text()
    with pytest.raises(InvalidValue, match="lists 'fedavg' twice"):
        configuration({"algorithms": {"one": "fedavg", "other": "fedavg"}})
