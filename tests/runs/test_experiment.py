"""Runs and comparisons: their results and files."""

from __future__ import annotations

import csv
import json
import statistics
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.common.errors import CheckpointError, InvalidValue
from fedloom.common.expression import parse
from fedloom.common.fields import checked
from fedloom.data.dataset import make_dataset
from fedloom.data.partition import Partition
from fedloom.parts.building import build
from fedloom.recording.recorder import build_recorders
from fedloom.rounds.checkpoint import RoundLog
from fedloom.runs.config_file import configuration, load
from fedloom.runs.configuration import Configuration
from fedloom.runs.configured import run_configured, run_directory
from fedloom.runs.directory import RunDirectory
from fedloom.runs.events import Event, RunName
from fedloom.runs.finished_round import FinishedRound
from fedloom.runs.identity import version_changes
from fedloom.serving.artifact import load_model, save_model
from fedloom.state.files import write_text
from fedloom.state.tensors import read_tensors
from fedloom.study.comparison import Comparison
from json_lines import json_lines
from small_task import small_task


def task(seed: int = 0) -> fl.Task:
    return fl.make_task(
        "digits",
        clients=5,
        partition="iid",
        model="logistic",
        training={"learning_rate": 0.1},
        seed=seed,
    )


def share_right(model: nn.Module, of: fl.Task) -> float:
    with torch.no_grad():
        guesses = model(of.dataset.prepare(of.test.inputs)).argmax(1)
    return float((guesses == of.test.labels).float().mean())


def plan(folder: Path, **keys: object) -> Configuration:
    return configuration(
        {
            "name": "job",
            "directory": str(folder),
            "rounds": 4,
            "participation": 0.5,
            "evaluate_every": 1,
            "model": "logistic",
            "data": {"clients": 4, "partition": "iid"},
            "training": {"learning_rate": 0.1},
            **keys,
        }
    )


def test_a_run_returns_its_model_and_its_history() -> None:
    of = task()
    rounds: list[int] = []
    result = fl.run(
        fl.FedAvg(),
        of,
        rounds=6,
        participation=0.6,
        evaluate_every=2,
        on_round=lambda round: rounds.append(round.number),
    )
    assert rounds == [1, 2, 3, 4, 5, 6] == [record["round"] for record in result.history]
    measured = {
        record["round"]: record["accuracy"] for record in result.history if "accuracy" in record
    }
    assert list(measured) == [2, 4, 6]
    assert share_right(result.model, of) == pytest.approx(measured[6]) == result.accuracy
    assert result.best_accuracy == max(measured.values())
    target = statistics.median(measured.values())
    assert result.rounds_to(target) == next(
        number for number, accuracy in measured.items() if accuracy >= target
    )
    assert result.rounds_to(1.0) is None
    assert not result.model.training


def test_a_run_leaves_the_given_method_unchanged() -> None:
    method = fl.FedMR()
    result = fl.run(method, task(), rounds=2, participation=0.6)
    original = result.federation.model().clone()
    fl.run(method, task(), rounds=3, participation=0.6, seed=1)
    assert not hasattr(method, "state")
    assert torch.equal(result.federation.model(), original)


def test_an_expression_is_a_method_too() -> None:
    of = task()
    expression = fl.run("fedmr(unit=tensor)", of, rounds=3, participation=0.6).model
    built = fl.run(fl.FedMR(unit="tensor"), of, rounds=3, participation=0.6).model
    assert all(
        torch.equal(a, b) for a, b in zip(expression.parameters(), built.parameters(), strict=True)
    )


def test_a_model_with_integer_buffers_is_saved_and_loaded(tmp_path: Path) -> None:
    of = small_task()
    result = fl.run("fedavg", of, rounds=3, participation=0.5, directory=tmp_path)
    state = result.model.state_dict()
    assert int(state["norm.num_batches_tracked"]) > 0
    tensors, _ = read_tensors(tmp_path / "model.safetensors")
    assert tensors.keys() == state.keys()
    assert all(
        torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype
        for name, tensor in state.items()
    )
    loaded = load_model(tmp_path, module=of.model)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), state.values(), strict=True)
    )
    assert not torch.equal(
        loaded.state_dict()["hidden.weight"], of.model.state_dict()["hidden.weight"]
    )


def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    def stop(round: FinishedRound) -> None:
        if round.number == 3:
            raise KeyboardInterrupt

    of, uninterrupted, resumed = task(), tmp_path / "uninterrupted", tmp_path / "resumed"
    fl.run("fedmr", of, rounds=6, participation=0.6, directory=uninterrupted)
    with pytest.raises(KeyboardInterrupt):
        fl.run("fedmr", of, rounds=6, participation=0.6, directory=resumed, on_round=stop)
    assert not (resumed / "result.json").exists()
    result = fl.run("fedmr", of, rounds=6, participation=0.6, directory=resumed)
    assert len(result.history) == 6
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (resumed / name).read_bytes() == (uninterrupted / name).read_bytes()
    with pytest.raises(CheckpointError, match=r"participation = 0\.6, not 0\.8"):
        fl.run("fedmr", of, rounds=7, participation=0.8, directory=resumed)
    # equal settings, different data and weights
    with pytest.raises(CheckpointError, match="a run with another split"):
        fl.run("fedmr", task(seed=1), rounds=6, participation=0.6, directory=resumed)


def test_a_run_directory_holds_settings_split_and_results(tmp_path: Path) -> None:
    job = plan(tmp_path, data={"clients": 4, "partition": "dirichlet(0.5)", "local_test": 0.25})
    summary = run_configured(job, RunName("fedmr", 3), lambda event: None)
    directory = tmp_path / "fedmr" / "seed-3"
    settings = json.loads((directory / "configuration.json").read_text())
    assert settings["algorithm"] == "fedmr"
    assert settings["data"] == {
        "name": "digits",
        "clients": 4,
        "partition": "dirichlet(0.5)",
        "local_test": 0.25,
        "merge": False,
        "validation": None,
        "label_noise": "none",
        "shift": "none",
    }
    assert settings["training"]["learning_rate"] == 0.1
    task = job.task(3)
    split = Partition.load(directory / "split.npz")
    assert (split.indices == task.partition.indices).all()
    assert task.local_test is not None
    assert (Partition.load(directory / "test-split.npz").indices == task.local_test.indices).all()
    lines = json_lines(directory / "metrics.jsonl")
    assert lines == summary.records
    assert json.loads((directory / "result.json").read_text())["accuracy"] == lines[-1]["accuracy"]
    assert json.loads((directory / "environment.json").read_text())["torch"] == torch.__version__
    labels = task.train.labels.numpy()
    assert summary.label_counts == [
        [int((labels[split[k]] == c).sum()) for c in range(10)] for k in range(4)
    ]
    assert share_right(load_model(directory), task) == pytest.approx(lines[-1]["accuracy"])


def test_equal_seeds_write_equal_bytes(tmp_path: Path) -> None:
    job, repeated = plan(tmp_path / "a"), plan(tmp_path / "b")
    for configured, seed in ((job, 0), (repeated, 0), (job, 1)):
        run_configured(configured, RunName("fedmr", seed), lambda event: None)
    for name in (
        "metrics.jsonl",
        "model.safetensors",
        "split.npz",
        "configuration.json",
        "task.json",
    ):
        reference = (tmp_path / "a/fedmr/seed-0" / name).read_bytes()
        assert reference == (tmp_path / "b/fedmr/seed-0" / name).read_bytes()
        assert name == "task.json" or reference != (tmp_path / "a/fedmr/seed-1" / name).read_bytes()


def test_a_finished_run_is_only_read(tmp_path: Path) -> None:
    job, name = plan(tmp_path), RunName("fedavg", 0)
    summary = run_configured(job, name, lambda event: None)
    written = {path: path.stat().st_mtime_ns for path in run_directory(job, *name).path.iterdir()}
    events: list[Event] = []
    repeated = run_configured(job, name, events.append)
    assert [event.kind for event in events] == ["skipped"]
    assert repeated == summary
    assert all(
        path.stat().st_mtime_ns == time for path, time in written.items() if path.name != ".lock"
    )
    events.clear()
    run_configured(job, name, events.append, fresh=True)
    assert [event.kind for event in events] == ["started", *["round"] * 4, "ended"]
    with pytest.raises(CheckpointError, match=r"training\.learning_rate = 0\.1, not 0\.2"):
        run_configured(plan(tmp_path, training={"learning_rate": 0.2}), name, events.append)


def test_fresh_removes_a_runs_files_and_no_others(tmp_path: Path) -> None:
    job, name = plan(tmp_path, engine="default"), RunName("fedavg", 0)
    run_configured(job, name, lambda event: None)
    directory = run_directory(job, *name).path
    assert (directory / "engine.json").exists()
    (directory / "notes.txt").write_text("mine")
    RunDirectory(directory).clear()
    assert {path.name for path in directory.iterdir()} <= {"notes.txt", ".lock"}
    assert (directory / "notes.txt").read_text() == "mine"


def test_a_comparison_gives_every_method_the_same_start(tmp_path: Path) -> None:
    job = plan(tmp_path, algorithms=["fedavg", "indep", "fedmr"], seeds=[0, 1], targets=[0.3, 1.0])
    comparison = Comparison.of(job)
    events: list[Event] = []
    assert comparison.run(events.append) == {}
    for seed in (0, 1):
        folders = [tmp_path / method / f"seed-{seed}" for method in ("fedavg", "indep", "fedmr")]
        assert len({(folder / "split.npz").read_bytes() for folder in folders}) == 1
        firsts = [
            json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]) for folder in folders
        ]
        # After one round from one model, recombination has not changed the mean of the pool.
        assert firsts[1]["accuracy"] == firsts[2]["accuracy"]
        assert firsts[0]["clients"] == firsts[1]["clients"] == firsts[2]["clients"]
        assert (
            firsts[0]["training_loss"] == firsts[1]["training_loss"] == firsts[2]["training_loss"]
        )
    rows = comparison.result({}).sheets[0].rows
    finals = [
        json.loads((tmp_path / f"fedmr/seed-{seed}/result.json").read_text())["accuracy"]
        for seed in (0, 1)
    ]
    assert rows["final"].iloc[2] is not None
    assert rows["final"].iloc[2].mean == pytest.approx(statistics.fmean(finals))
    assert rows["final"].iloc[2].std == pytest.approx(statistics.stdev(finals))
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["accuracy"] for run in report["runs"] if run["algorithm"] == "fedmr"] == finals
    assert report["failed"] == []
    with (tmp_path / "comparison.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == ["fedavg", "indep", "fedmr"]
    assert float(lines[2]["final"]) == pytest.approx(rows["final"].iloc[2].mean)
    assert lines[0]["rounds_to_1"] == ""
    assert "</html>" in (tmp_path / "report.html").read_text().lower()


def test_an_interrupted_comparison_resumes_run_by_run(tmp_path: Path) -> None:
    job = plan(tmp_path, algorithms=["fedavg", "fedmr"], seeds=[0, 1])
    rounds = 0

    def stopped() -> bool:
        return rounds >= 6  # in the middle of the second run

    def watch(event: Event) -> None:
        nonlocal rounds
        rounds += event.kind == "round"

    with pytest.raises(KeyboardInterrupt):
        Comparison.of(job).run(watch, stopped=stopped)
    events: list[Event] = []
    Comparison.of(job).run(events.append)
    assert [
        (event.kind, event.finished) for event in events if event.kind in ("skipped", "started")
    ] == [
        ("skipped", 4),
        ("started", 2),
        ("started", 0),
        ("started", 0),
    ]
    events.clear()
    Comparison.of(job).run(events.append)
    assert {event.kind for event in events} == {"skipped"}


def test_a_failed_run_stops_no_other(tmp_path: Path) -> None:
    job = plan(tmp_path, algorithms=["fedavg", "fedavgm(learning_rate=1e38)"], rounds=5)
    events: list[Event] = []
    failed = Comparison.of(job).run(events.append)
    assert [name.algorithm for name in failed] == ["fedavgm(learning_rate=1e+38)"]
    assert "diverged" in next(iter(failed.values()))
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["algorithm"] for run in report["runs"]] == ["fedavg"]
    assert len(report["failed"]) == 1


def test_two_comparisons_in_one_folder_do_not_mix_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one comparison writes its files, the other waits, so files of both do not mix."""
    comparison, later = (
        Comparison.of(plan(tmp_path, algorithms=[name])) for name in ("fedavg", "fedmr")
    )
    comparison.run(lambda event: None)
    later.run(lambda event: None)
    thread = threading.Thread(target=later.result({}).write, args=(later.configuration,))
    written: list[tuple[bool, str]] = []

    def write_slowly(path: Path, text: str) -> None:
        mine = threading.current_thread() is threading.main_thread()
        written.append((mine, path.name))
        if mine and not thread.ident:
            thread.start()
            thread.join(timeout=2)
        write_text(path, text)

    monkeypatch.setattr("fedloom.study.comparison_result.write_text", write_slowly)
    comparison.result({}).write(comparison.configuration)
    thread.join()
    assert [mine for mine, _ in written] == [True] * 4 + [False] * 4
    assert "fedmr" in (tmp_path / "comparison.csv").read_text()
    assert [
        run["algorithm"] for run in json.loads((tmp_path / "comparison.json").read_text())["runs"]
    ] == ["fedmr"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithms": []}, "nothing to compare"),
        ({"algorithms": ["fedavg"], "data": {"clients": 5000, "partition": "iid"}}, "5000 clients"),
        ({"algorithms": ["fedavg"], "data": {"clients": 4, "partition": "dirichlet(0)"}}, "alpha must be"),
        ({"algorithms": ["fedavg", "scaffold(option=3)"]}, "option"),
        ({"algorithms": ["fedavg"], "new_clients": 0.5}, "local_test"),
    ],
)  # fmt: skip
def test_a_bad_run_is_refused_before_the_first_begins(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        Comparison.of(plan(tmp_path, **keys)).run(lambda event: None)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_run_of_another_configuration_stops_a_comparison_before_it_begins(tmp_path: Path) -> None:
    run_configured(plan(tmp_path), RunName("fedmr", 0), lambda event: None)
    job = plan(tmp_path, algorithms=["fedavg", "fedmr"], participation=0.75)
    with pytest.raises(CheckpointError, match=r"participation = 0\.5, not 0\.75"):
        Comparison.of(job).run(lambda event: None)
    assert not (tmp_path / "fedavg").exists()


class TestArtifact:
    def test_a_registered_model_is_built_again_by_name(self, tmp_path: Path) -> None:
        of = fl.make_task("digits", clients=3, partition="iid", model="mlp(hidden=[7])", seed=4)
        path = tmp_path / "model.safetensors"
        save_model(path, of.model, "mlp(hidden=[7])", of.dataset.spec, {})
        contents = path.read_bytes()
        loaded = load_model(path)
        for tensor, expected in zip(loaded.parameters(), of.model.parameters(), strict=True):
            assert torch.equal(tensor, expected)
        save_model(path, loaded, "mlp(hidden=[7])", of.dataset.spec, {})
        assert path.read_bytes() == contents

    def test_tied_weights_stay_tied(self, tmp_path: Path) -> None:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = module[0].weight
        spec = small_task().dataset.spec
        save_model(tmp_path / "model.safetensors", module, "my.file:net", spec, {})
        loaded = load_model(tmp_path, module=module)
        assert isinstance(loaded, nn.Sequential)
        assert loaded[0].weight is loaded[1].weight
        assert torch.equal(loaded[0].weight, module[0].weight)

    @pytest.mark.parametrize(
        ("expression", "message"),
        [
            ("os:getcwd", "give it as module="),
            ("nothing", "its model is your own"),
            ("mlp(hidden=[9])", "cannot be built again"),
        ],
    )
    def test_only_a_registered_model_that_fits_is_built_from_a_file(
        self, tmp_path: Path, expression: str, message: str
    ) -> None:
        of = fl.make_task("digits", clients=3, partition="iid", model="mlp(hidden=[7])")
        save_model(tmp_path / "model.safetensors", of.model, expression, of.dataset.spec, {})
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path)

    def test_other_tensors_are_refused(self, tmp_path: Path) -> None:
        save_model(
            tmp_path / "model.safetensors",
            nn.Linear(2, 2),
            "logistic",
            small_task().dataset.spec,
            {},
        )
        with pytest.raises(CheckpointError, match="cannot be built again"):
            load_model(tmp_path)

    def test_a_truncated_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_model(path, small_task().model, "x:y", small_task().dataset.spec, {})
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            load_model(path, module=small_task().model)


def test_changed_versions_are_named_when_a_run_resumes() -> None:
    environment = {"torch": "2.12.0", "threads": 2, "platform": "a"}
    assert version_changes(environment, {**environment, "platform": "b"}) == ""
    assert (
        version_changes(environment, {**environment, "torch": "2.13.0"})
        == "torch 2.12.0 (now 2.13.0)"
    )


def test_a_configuration_is_parsed_and_built_once_a_run(tmp_path: Path) -> None:
    """A run parses and builds its configuration once, counted from the file to the finished run."""
    (tmp_path / "job.toml").write_text(
        'algorithm = "fedmr"\nrounds = 2\nmodel = "logistic"\nrecord = '
        '["objective"]\ndata.clients = 4'
    )
    limits: dict[Any, int] = {
        build: 1,
        parse.__wrapped__: 8,
        checked: 30,
        RoundLog.read: 11,
        build_recorders: 1,
        make_dataset: 1,
    }
    counted = {function.__code__: 0 for function in limits}

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in counted:
            counted[frame.f_code] += 1

    parse.cache_clear()
    sys.setprofile(count)
    try:
        experiment = load(tmp_path / "job.toml", [f"directory={tmp_path / 'run'}"])
        run_configured(experiment, RunName("fedmr", 0), lambda event: None)
    finally:
        sys.setprofile(None)
    calls = {function.__qualname__: counted[function.__code__] for function in limits}
    assert all(0 < calls[function.__qualname__] <= most for function, most in limits.items()), calls
