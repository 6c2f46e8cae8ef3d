"""Engines by name, the one that `auto` takes, and what is told and kept of the choice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.algorithm import build
from fedloom.engines.base import Choice
from fedloom.engines.choose import make_engine
from fedloom.engines.dispatch import WorkerHandle
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.engines.trial import Candidates, TrialRound, recalled
from fedloom.engines.trial_result import TrialResult, deciding
from fedloom.engines.work import mean_steps
from fedloom.errors import FedloomError, UnknownName
from fedloom.experiment import run as experiments
from fedloom.experiment.configuration import configuration
from fedloom.experiment.events import Event, RunName
from fedloom.experiment.run import run_configured, run_directory
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task, make_task
from test_stacked import Branching, assert_same, federated, world


def test_an_engine_is_made_by_its_name() -> None:
    task = world()
    engine = make_engine("stacked", task, chunk=3)
    assert isinstance(engine, StackedEngine)
    assert engine.chunk == 3
    assert str(engine.chosen) == "stacked"
    refused: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("stakced", {}, "did you mean .stacked."),
        ("rows", {"chunk": 3}, "chunk"),
        ("stacked", {"chunk": 0}, "at least 1"),
    )
    for name, options, words in refused:
        with pytest.raises(FedloomError, match=words):
            make_engine(name, task, **options)


NAMES = ("rows", "stacked", "processes", "processes(inside=stacked)")
SHORT = Schedule(rounds=5, participation=1.0)
"""So few rounds that no workers are tried."""


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def timed(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[str]:
    """Let trials take so many seconds, by the engine's name, on a machine of two cores; the names as they are tried."""
    tried: list[str] = []
    run = TrialRound._run

    def told(trial: TrialRound, engine: RowsEngine | ProcessesEngine, count: int) -> float:
        run(trial, engine, count)
        name = {RowsEngine: "rows", StackedEngine: "stacked", ProcessesEngine: "processes"}[type(engine)]
        if isinstance(engine, ProcessesEngine) and engine.inside == "stacked":
            name = "processes(inside=stacked)"
        tried.extend([name] if name not in tried else [])
        return seconds[name]

    monkeypatch.setattr(TrialRound, "_run", told)
    monkeypatch.setattr("fedloom.engines.work.torch.get_num_threads", lambda: 2)
    return tried


@pytest.mark.parametrize("wanted", NAMES)
def test_auto_takes_the_fastest_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    task = world()
    seconds = {**dict.fromkeys(NAMES, 0.03), wanted: 0.01}
    started: list[int] = []
    start = ProcessesEngine._start

    def counted(engine: ProcessesEngine) -> WorkerHandle:
        started.append(1)
        return start(engine)

    monkeypatch.setattr(ProcessesEngine, "_start", counted)
    tried = timed(monkeypatch, seconds)
    engine = make_engine("auto", task)
    monkeypatch.undo()
    # Workers do not train in a way that took three times as long here.
    passed_over = {"rows": NAMES[3], "stacked": NAMES[2]}.get(wanted)
    seconds.pop(passed_over or "", None)
    assert tried == list(seconds)
    assert len(started) == 2
    assert engine.chosen is not None
    assert engine.chosen.name == wanted
    assert engine.chosen.seconds == seconds
    assert (
        str(engine.chosen) == f"{wanted} (trial round: " + ", ".join(f"{n} {s:.3g} s" for n, s in seconds.items()) + ")"
    )
    assert engine.task is task
    assert engine.memory() == {}
    run = Federation(build("fedavg"), task, engine, Schedule(rounds=3, participation=0.7, seed=3, evaluate_every=1))
    run.run()
    if isinstance(engine, ProcessesEngine):
        assert engine.chunk == (1 if engine.inside == "rows" else 64)
    assert_same(federated(RowsEngine, task, "fedavg"), run)
    engine.close()


def test_auto_starts_no_workers_for_few_short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    task = world()
    tried = timed(monkeypatch, dict.fromkeys(NAMES, 0.01))
    make_engine("auto", task, SHORT)
    assert tried == ["rows", "stacked"]


def test_a_trial_counts_what_the_rounds_to_come_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """World: 6 clients with 3, 6, 2, 4, 4 and 2 batches of 4, two epochs, so 7 steps each on average."""
    task = world()
    assert mean_steps(task) == 7
    assert mean_steps(replace(task, training=replace(task.training, steps=5))) == 5
    assert mean_steps(replace(task, training=replace(task.training, batch_size=None))) == 2
    timed(monkeypatch, {"rows": 0.2})
    trial = TrialRound(task, RowsEngine(task))
    assert trial.clients == 4  # a step took longer than LONG_STEP
    assert trial.task.training.steps == trial.steps == 1
    found = TrialResult({}, trial.clients, trial.steps, {"rows": trial.fastest}, "")
    assert found.to_come(task, Schedule(rounds=10, participation=0.5)) == pytest.approx(10 * 0.2 * 7 * 3 / 4)
    assert found.to_come(task, None) == float("inf")
    timed(monkeypatch, {"rows": 0.01})
    assert TrialRound(task, RowsEngine(task)).task is task


def chosen(engine: str, task: Task, schedule: Schedule = SHORT) -> Choice:
    found = make_engine(engine, task, schedule).chosen
    assert found is not None
    return found


def test_what_auto_found_is_kept_for_the_next_run(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    task = world()
    tried = timed(monkeypatch, {"rows": 0.03, "stacked": 0.02})
    first = chosen("auto", task)
    assert (first.name, first.kept_from, tried) == ("stacked", "", ["rows", "stacked"])
    tried.clear()
    slower = replace(task, training=replace(task.training, learning_rate=0.5))
    for same in (task, slower):
        again = chosen("auto", same)
        assert (again.name, again.seconds, tried) == ("stacked", first.seconds, [])
        when = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
        assert re.fullmatch(
            rf"stacked \(trial round of an earlier run, {when}: rows 0.03 s, stacked 0.02 s\)", str(again)
        )
    for other in (world(batch_size=3), world(momentum=0.25), world(steps=3), world(norm=False)):
        tried.clear()
        assert chosen("auto", other).kept_from == ""
        assert tried == ["rows", "stacked"]
    tried.clear()
    assert chosen("auto(fresh=true)", task).kept_from == ""
    with monkeypatch.context() as changed:
        changed.setattr(torch, "__version__", "9.0")
        assert chosen("auto", task).kept_from == ""
    assert len(list(empty_cache.glob("auto/*.json"))) == 6
    candidates = Candidates(task, None, False, RowsEngine(task).proof, 0)
    of = deciding(task, SHORT)
    assert recalled(candidates, of) is None  # for so many rounds workers are worth a trial
    candidates.in_process = True
    assert recalled(candidates, of) is not None


@pytest.mark.parametrize("content", [b"\0{", b"[]", b"negative", b"of another", None])
def test_a_damaged_trial_result_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path, content: bytes | None
) -> None:
    task = world()
    tried = timed(monkeypatch, {"rows": 0.03, "stacked": 0.02})
    make_engine("auto", task, SHORT)
    (path,) = empty_cache.glob("auto/*.json")
    whole = json.loads(path.read_text())
    if content is None:
        path.unlink()
        path.mkdir()
    elif content == b"negative":
        path.write_text(json.dumps({**whole, "seconds": {"rows": -1.0}}))
    elif content == b"of another":
        path.write_text(json.dumps({**whole, "of": {**whole["of"], "torch": "9.0"}}))
    else:
        path.write_bytes(content)
    tried.clear()
    assert chosen("auto", task).kept_from == ""
    assert tried == ["rows", "stacked"]
    assert content is None or json.loads(path.read_text())["seconds"] == whole["seconds"]


def test_auto_measures_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "file" / "cache"))
    timed(monkeypatch, {"rows": 0.03, "stacked": 0.02})
    for _ in range(2):
        assert chosen("auto", world()).kept_from == ""


def test_auto_passes_over_stacks_of_models_that_cannot_be_stacked() -> None:
    task = replace(world(False), model=Branching())
    assert chosen("auto", task).seconds.keys() == {"rows"}


def test_a_configuration_names_its_engine(tmp_path: Path) -> None:
    """With `auto` what was measured is told and kept; an unknown name is refused before any work."""
    table = {
        "algorithm": "fedavg",
        "rounds": 2,
        "engine": "auto",
        "directory": str(tmp_path),
        "data": {"name": "digits", "clients": 6},
        "model": "logistic",
    }
    heard: list[Event] = []
    experiment = configuration(table)
    name = RunName("fedavg", 0)
    run_configured(experiment, name, heard.append)
    told = [event.text for event in heard if event.kind == "started"]
    assert len(told) == 1
    assert "trial round: rows" in told[0]
    kept = json.loads((run_directory(experiment, *name).path / "engine.json").read_text())
    assert told[0].startswith(f"{kept['name']} (")
    assert {"rows", "stacked"} <= kept["seconds"].keys()
    assert experiment.resolved(*name)["engine"] == "auto"
    assert configuration({**table, "engine": "rows"}).resolved(*name)["engine"] == "rows"
    with pytest.raises(UnknownName, match=r"engine 'stackd'.*did you mean 'stacked'"):
        configuration({**table, "engine": "stackd"})


def test_auto_takes_the_option_that_it_is_documented_with() -> None:
    task = world()
    assert make_engine("auto(memory_budget=1000)", task, Schedule(2)).store.budget == 1000
    with pytest.raises(FedloomError, match="memory_budget must be a whole number, not 'much'"):
        make_engine("auto(memory_budget=much)", task)
    with pytest.raises(FedloomError, match="auto has no parameter 'workers'"):
        make_engine("auto(workers=2)", task)


def test_a_run_in_python_takes_an_engine() -> None:
    task = make_task("digits", clients=6, partition="dirichlet(0.5)", model="mlp(hidden=[16])")
    one = experiments.run("fedavg", task, rounds=2, participation=0.5)
    many = experiments.run("fedavg", task, rounds=2, participation=0.5, engine="stacked")
    assert isinstance(many.federation.engine, StackedEngine)
    assert_same(one.federation, many.federation, tolerance=1e-5)
