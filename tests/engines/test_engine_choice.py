"""Engines by name; the choice is reported and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.common.errors import FedloomError, UnknownName
from fedloom.engines.choose import make_engine
from fedloom.engines.stacked import StackedEngine
from fedloom.rounds.schedule import Schedule
from fedloom.runs.config_file import configuration
from fedloom.runs.configured import run_configured, run_directory
from fedloom.runs.events import Event, RunName
from stacked_support import world


def test_engines_are_built_by_name() -> None:
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


def test_a_configuration_names_its_engine(tmp_path: Path) -> None:
    """The choice of `auto`, the former name of `default`, is reported and saved; an unknown name is
    refused before any work.
    """
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
    reasons = [event.text for event in heard if event.kind == "started"]
    assert len(reasons) == 1
    assert reasons[0] == "stacked (linear layers train fastest in stacks)"
    choice = json.loads((run_directory(experiment, *name).path / "engine.json").read_text())
    assert choice["name"] == "stacked"
    assert experiment.resolved(*name[:2])["engine"] == "auto"
    assert configuration({**table, "engine": "rows"}).resolved(*name[:2])["engine"] == "rows"
    with pytest.raises(UnknownName, match=r"engine 'stackd'.*did you mean 'stacked'"):
        configuration({**table, "engine": "stackd"})


def test_auto_is_default() -> None:
    task = world()
    by_rule = make_engine("default", task, Schedule(2))
    assert make_engine("auto", task, Schedule(2)).chosen == by_rule.chosen
    assert make_engine("auto(memory_budget=1000)", task, Schedule(2)).store.budget == 1000
    with pytest.raises(FedloomError, match="memory_budget must be a whole number, not 'much'"):
        make_engine("auto(memory_budget=much)", task)
    with pytest.raises(FedloomError, match="auto has no parameter 'workers'"):
        make_engine("auto(workers=2)", task)
