"""Runs of a comparison in Ray actors: the same as here, each with its own fate."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from fedloom.engines.dispatch import WorkerDied
from fedloom.engines.ray.driver import RayEngine
from fedloom.engines.ray.session import LOCAL, Session
from fedloom.errors import InvalidValue
from fedloom.experiment.comparison import Comparison
from fedloom.experiment.configuration import Configuration, configuration
from fedloom.experiment.events import Event
from fedloom.experiment.pools import RunActorHandle
from ray_support import descendants, gone

pytest.importorskip("ray")


def command(process: int) -> str:
    """Return a process's command line."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return ""


def plan(folder: Path, **more: object) -> Configuration:
    return configuration(
        {
            "name": "job",
            "directory": str(folder),
            "algorithms": ["fedavg", "fedavgm(learning_rate=1e38)", "fedmr"],
            "rounds": 5,
            "participation": 0.5,
            "model": "logistic",
            "threads": 1,
            "data": {"clients": 4, "partition": "iid"},
            **more,
        }
    )


def test_runs_in_actors_are_those_made_here_and_fail_alone(tmp_path: Path, ray_actors: RayEngine) -> None:
    before = {*descendants()}
    events: list[Event] = []
    failed = Comparison.of(plan(tmp_path / "ray", pool="ray")).run(events.append)
    assert ray_actors.processes, "the cluster stays for the engine"
    assert gone({process for process in {*descendants()} - before if "RunActor" in command(process)})
    assert [name.algorithm for name in failed] == ["fedavgm(learning_rate=1e+38)"]
    assert "diverged" in next(iter(failed.values()))
    assert sum(event.kind == "round" and event.run.algorithm == "fedmr" for event in events) == 5
    Comparison.of(plan(tmp_path / "here")).run(lambda event: None)
    for method in ("fedavg", "fedmr"):
        found = [tmp_path / where / method / "seed-0" / "metrics.jsonl" for where in ("ray", "here")]
        assert found[0].read_bytes() == found[1].read_bytes()
    events.clear()
    Comparison.of(plan(tmp_path / "ray", algorithms=["fedavg", "fedmr"], pool="ray")).run(events.append)
    assert {event.kind for event in events} == {"skipped"}


@pytest.mark.parametrize("noticed", ["silence", "an error"])
def test_a_node_that_has_died_is_told_with_how_to_go_on(noticed: str, tmp_path: Path) -> None:
    """Both if its actors are silent and if Ray has already noticed."""
    ray = MagicMock()
    ray.exceptions.RayError = ConnectionError
    ray.wait.side_effect = lambda calls, timeout: ([], calls) if noticed == "silence" else (calls, [])
    ray.get.side_effect = ConnectionError("The actor is temporarily unavailable")
    dead = Session(LOCAL, started=True, raylet=MagicMock(**{"is_running.return_value": False}))
    (job, *_) = Comparison.of(plan(tmp_path)).jobs()
    with pytest.raises(WorkerDied, match=r"^the Ray node .* has died .*: the same command goes on from the last"):
        RunActorHandle(ray, dead, threads=1).make(job, False, lambda event: None)


def test_a_pool_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"pool must be processes, ray or .*, not 'rya'"):
        plan(tmp_path, pool="rya")
