"""Engines by name, the one that `auto` takes, and what is told and kept of the choice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.algorithm import build
from fedloom.engines.choose import make_engine
from fedloom.engines.local import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import InvalidValue
from fedloom.experiment import run as experiments
from fedloom.experiment.configuration import configuration
from fedloom.experiment.events import Event, RunName
from fedloom.experiment.run import run_configured, run_directory
from fedloom.federation import Federation
from fedloom.schedule import Schedule
from fedloom.task import make_task
from test_stacked import Branching, assert_same, federated, world


def test_an_engine_is_made_by_its_name() -> None:
    task = world()
    engine = make_engine("stacked", task, chunk=3)
    assert isinstance(engine, StackedEngine)
    assert engine.chunk == 3
    assert str(engine.chosen) == "stacked"
    for name, options, words in (
        ("stakced", {}, "did you mean .stacked."),
        ("rows", {"chunk": 3}, "chunk"),
        ("stacked", {"chunk": 0}, "at least 1"),
    ):
        with pytest.raises(InvalidValue, match=words):
            make_engine(name, task, **options)


def test_auto_takes_the_fastest_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    task = world()
    seconds = {"StackedEngine": iter([9.0, 1.0, 2.0]), "RowsEngine": iter([9.0, 3.0, 4.0])}
    now = [0.0]
    train = {kind: kind.train for kind in (RowsEngine, StackedEngine)}

    def timed(self: RowsEngine, *rest: Any) -> Any:
        answers = list(train[type(self)](self, *rest))
        now[0] += next(seconds[type(self).__name__])
        return iter(answers)

    for kind in train:
        monkeypatch.setattr(kind, "train", timed)
    monkeypatch.setattr("fedloom.engines.choose.time.perf_counter", lambda: now[0])
    engine = make_engine("auto", task)
    monkeypatch.undo()
    assert isinstance(engine, StackedEngine)
    assert engine.chosen is not None
    assert engine.chosen.name == "stacked"
    assert engine.chosen.seconds == {"rows": 3.0, "stacked": 1.0}
    assert str(engine.chosen) == "stacked (trial round: rows 3 s, stacked 1 s)"
    assert engine.memory() == {}
    schedule = Schedule(rounds=3, participation=0.7, seed=3, evaluate_every=1)
    run = Federation(build("fedavg"), task, engine, schedule)
    run.run()
    assert_same(federated(RowsEngine, task, "fedavg"), run)


def test_auto_passes_over_stacks_of_models_that_cannot_be_stacked() -> None:
    task = replace(world(False), model=Branching())
    chosen = make_engine("auto", task).chosen
    assert chosen is not None
    assert chosen.seconds.keys() == {"rows"}


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
    told = [event.text for event in heard if event.kind == "notice"]
    assert len(told) == 1
    assert "trial round: rows" in told[0]
    kept = json.loads((run_directory(experiment, *name).path / "engine.json").read_text())
    assert f"engine: {kept['name']} " in told[0]
    assert {"rows", "stacked"} <= kept["seconds"].keys()
    assert experiment.resolved(*name)["engine"] == "auto"
    assert "engine" not in configuration({**table, "engine": "rows"}).resolved(*name)
    with pytest.raises(InvalidValue, match=r"engine 'stackd' is not allowed.*stacked"):
        configuration({**table, "engine": "stackd"})


def test_a_run_in_python_takes_an_engine() -> None:
    task = make_task("digits", clients=6, partition="dirichlet(0.5)", model="mlp(hidden=[16])")
    one = experiments.run("fedavg", task, rounds=2, participation=0.5)
    many = experiments.run("fedavg", task, rounds=2, participation=0.5, engine="stacked")
    assert isinstance(many.federation.engine, StackedEngine)
    assert_same(one.federation, many.federation, tolerance=1e-5)
