"""Runs of a comparison in Ray tasks equal local runs and fail independently."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from fedloom.common.errors import InvalidValue
from fedloom.engines.ray.driver import RayEngine
from fedloom.engines.ray.session import LOCAL, Session
from fedloom.runs.config_file import configuration
from fedloom.runs.configuration import Configuration
from fedloom.runs.events import Event
from fedloom.study import pools
from fedloom.study.comparison import Comparison
from fedloom.study.pools import RayPool

pytest.importorskip("ray")


def plan(folder: Path, **settings: object) -> Configuration:
    return configuration(
        {
            "name": "job",
            "directory": str(folder),
            "algorithms": ["fedavg", "fedavgm(learning_rate=1e38)", "fedmr"],
            "rounds": 3,
            "participation": 0.5,
            "model": "logistic",
            "threads": 1,
            "data": {"clients": 4, "partition": "iid"},
            **settings,
        }
    )


def test_runs_in_tasks_are_those_made_here_and_fail_alone(
    tmp_path: Path, ray_actors: RayEngine
) -> None:
    events: list[Event] = []
    failed = Comparison.of(plan(tmp_path / "ray", pool="ray")).run(events.append)
    assert ray_actors.processes, "the cluster stays for the engine"
    assert [name.algorithm for name in failed] == ["fedavgm(learning_rate=1e+38)"]
    assert "diverged" in next(iter(failed.values()))
    assert sum(event.kind == "round" and event.run.algorithm == "fedmr" for event in events) == 3
    Comparison.of(plan(tmp_path / "here")).run(lambda event: None)
    for method in ("fedavg", "fedmr"):
        logs = [tmp_path / where / method / "seed-0" / "metrics.jsonl" for where in ("ray", "here")]
        assert logs[0].read_bytes() == logs[1].read_bytes()
    events.clear()
    Comparison.of(plan(tmp_path / "ray", algorithms=["fedavg", "fedmr"], pool="ray")).run(
        events.append
    )
    assert {event.kind for event in events} == {"skipped"}


@pytest.mark.parametrize("noticed", ["silence", "an error"])
def test_a_node_that_has_died_is_told_with_how_to_go_on(
    noticed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the same for silent workers and for a failure that Ray has noticed."""
    ray = MagicMock()
    ray.exceptions.RayError = ConnectionError
    ray.wait.side_effect = lambda calls, timeout: (
        ([], calls) if noticed == "silence" else (calls, [])
    )
    ray.get.side_effect = ConnectionError("The worker is temporarily unavailable")
    ray.nodes.return_value = [{"Alive": True, "Resources": {"CPU": 1}}]
    dead = Session(LOCAL, started=True, raylet=MagicMock(**{"is_running.return_value": False}))
    monkeypatch.setattr(pools, "load_ray", lambda: ray)
    monkeypatch.setattr(pools, "join", lambda *arguments: dead)
    (job, *_) = Comparison.of(plan(tmp_path)).jobs()
    failed = RayPool(LOCAL, 1, threads=1).run([job], lambda event: None, False, lambda: False)
    assert re.match(
        r"the Ray node .* has died .*: repeat the command to continue from the last",
        failed[job.name],
    )


def test_a_pool_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"pool must be processes, ray or .*, not 'rya'"):
        plan(tmp_path, pool="rya")
