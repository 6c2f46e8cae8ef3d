"""A run always closes its engine when it ends, so that no worker process or cluster outlives it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom as fl
from fedloom.common.errors import CheckpointError
from fedloom.engines.rows import RowsEngine
from fedloom.runs.config_file import configuration
from fedloom.runs.configured import run_configured
from fedloom.runs.events import Event, RunName

SMALL = {"rounds": 1, "model": "logistic", "data": {"clients": 4}, "training": {"batch_size": 50}}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[RowsEngine]:
    """Record the closed engines in order."""
    engines_made: list[RowsEngine] = []
    monkeypatch.setattr(RowsEngine, "close", lambda engine: engines_made.append(engine))
    return engines_made


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_in_python_closes_its_engine(
    closed: list[RowsEngine], tmp_path: Path, saved: bool
) -> None:
    task = fl.make_task("digits", clients=4, model="logistic")
    result = fl.run("fedavg", task, rounds=1, directory=tmp_path if saved else None)
    assert closed == [result.federation.engine]
    with pytest.raises(KeyboardInterrupt):
        fl.run(
            "fedmr",
            task,
            rounds=2,
            directory=tmp_path / "other" if saved else None,
            on_round=interrupted,
        )
    assert len(set(closed)) == len(closed) == 2


def test_a_configured_run_closes_its_engine_also_when_it_fails(
    closed: list[RowsEngine], tmp_path: Path
) -> None:
    configured = configuration({**SMALL, "algorithm": "fedavg", "directory": str(tmp_path)})

    def at_a_round(event: Event) -> None:
        if event.kind == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_configured(configured, RunName("fedavg", 0), at_a_round)
    assert len(closed) == 1
    run_configured(configured, RunName("fedavg", 0), lambda event: None)
    assert len(closed) == 2
    run_configured(configured, RunName("fedavg", 0), lambda event: None)  # reads existing files
    assert len(closed) == 2


def test_an_engine_is_closed_if_its_run_never_begins(
    closed: list[RowsEngine], tmp_path: Path
) -> None:
    task = fl.make_task("digits", clients=4, model="logistic")
    fl.run("fedavg", task, rounds=1, directory=tmp_path)
    # Files of a finished run are checked before an engine exists.
    (tmp_path / "result.json").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises((CheckpointError, OSError)):
        fl.run("fedavg", task, rounds=1, directory=tmp_path)
    assert len(closed) == 2
