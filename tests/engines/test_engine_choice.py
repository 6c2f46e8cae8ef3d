"""Engines by name; the choice is reported and saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.common.errors import FedloomError, UnknownName
from fedloom.engines.choose import make_engine
from fedloom.engines.dispatch import MOST_WORKERS
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


REFUSED = [
    ("stakced", "did you mean 'stacked'"),
    ("rya", "did you mean 'ray'"),
    ("rows(chunk=3)", "rows has no parameter 'chunk'"),
    ("stacked(chunk=0)", "chunk must be at least 1, not 0"),
    ("processes(workers=0)", f"processes: workers must be between 1 and {MOST_WORKERS}, not 0"),
    (
        "processes(workers=100000)",
        f"processes: workers must be between 1 and {MOST_WORKERS}, not 100000",
    ),
    (
        "processes(threads=100000)",
        f"processes: threads must be between 1 and {MOST_WORKERS}, not 100000.*",
    ),
    ("processes(threads=-1)", f"processes: threads must be between 1 and {MOST_WORKERS}, not -1"),
    ("processes(workers=2.5)", "processes: workers must be a whole number, not 2.5"),
    ("processes(workers=true)", "processes: workers must be a whole number, not true"),
    ("processes(threads=all)", "processes: threads must be a whole number, not 'all'"),
    (
        "processes(chunk=4)",
        "chunk = 4 is a number of models in a stack: set inside = stacked too",
    ),
    ("processes(inside=stacks)", "inside must be 'rows' or 'stacked', not 'stacks'"),
    ("processes(inside=stacked, chunk=0)", "chunk must be at least 1, not 0"),
    ("processes(memory_budget=-1)", "memory_budget must be at least 0, not -1"),
    ("processes(worker=2)", "processes has no parameter 'worker': did you mean 'workers'"),
    ("ray(worker=2)", "no parameter 'worker': did you mean 'workers'"),
    ("ray(workers=two)", "workers must be a whole number, not 'two'"),
    ("ray(workers=0)", "workers must be between 1 and 10000, not 0"),
    ("ray(workers=9999)", f"workers must be at most {MOST_WORKERS} on this machine, not 9999"),
    ("ray(workers=100000, address=auto)", "workers must be between 1 and 10000, not 100000"),
    ("ray(cpus=0)", "cpus must be between 0.0001 and .*, not 0"),
    ("ray(cpus=inf)", "cpus must be between .*, not inf"),
    ("ray(gpus=-1)", "gpus must be at least 0 .*, not -1"),
    ("ray(gpus=1.5)", "gpus must be 0, a share from 0.0001 to 1 or a whole number, not 1.5"),
    ("ray(gpus=nan)", "gpus must be at least 0 .*, not nan"),
    ("ray(memory_budget=-1)", "memory_budget must be at least 0, not -1"),
    ("ray(inside=stakced)", "did you mean 'stacked'"),
    ("ray(object_store=5)", "object_store must be at least"),
    ("ray(workers=2", "cannot read"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_options_that_do_not_fit_are_refused_in_one_line(text: str, reason: str) -> None:
    if text.startswith("ray("):
        pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(FedloomError, match=reason) as caught:
        make_engine(text, world())
    assert "\n" not in str(caught.value)


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
