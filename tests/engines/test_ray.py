"""Clusters, transfers, options and the end of the actors of the Ray engine.

Two actors on a local cluster serve all tests. test_conformance.py compares results with other
engines.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine_support import CLIENTS, TASK, assert_same, jobs, run, set_up
from fedloom.algorithms.fedavg import FedAvg
from fedloom.cli import main
from fedloom.common.errors import FedloomError, InvalidValue, MissingExtra
from fedloom.engines.choose import read_engine, without_placement
from fedloom.engines.pickling import dump, load
from fedloom.engines.ray import driver, session
from fedloom.engines.ray.actor import TrainingActor
from fedloom.engines.ray.driver import RayEngine
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.study.run_process import EventBoard
from fedloom.task import Task
from fedloom.task.making import make_task
from ray_support import SCRIPT, gone, gone_soon, stopped

pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture
def engine(ray_actors: RayEngine) -> RayEngine:
    ray_actors.begin(TASK, None)
    return ray_actors


@cache
def digits() -> Task:
    return make_task(
        "digits",
        clients=6,
        partition="dirichlet(0.3)",
        model="mlp(hidden=[32])",
        training={"learning_rate": 0.05},
        local_test=0.25,
    )


# --- stacks ---


def test_actors_may_stack_their_clients(engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "inside", "stacked")
    engine.begin(digits(), None)
    options: dict[str, Any] = {"task": digits(), "rounds": 2, "personal_every": 2}
    federation = run(build("scaffold"), engine, **options)
    assert_same(federation, run(build("scaffold"), RowsEngine(digits()), **options), tolerance=1e-5)


# --- transfers ---


def test_a_round_puts_what_all_are_sent_once_and_fetches_one_answer_a_share(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = set_up(engine, FedAvg())
    list(engine.train(algorithm, *jobs(engine)))  # wait until both actors have started
    put, got = [], []
    real_put, real_get = engine._ray.put, engine._ray.get

    def noting_put(value: Any) -> Any:
        put.append(value)
        return real_put(value)

    def noting_get(call: Any) -> Any:
        got.append(real_get(call))
        return got[-1]

    monkeypatch.setattr(engine._ray, "put", noting_put)
    monkeypatch.setattr(engine._ray, "get", noting_get)
    assert len(list(engine.train(algorithm, *jobs(engine)))) == CLIENTS
    monkeypatch.undo()
    assert len(put) == 1
    words, memory = put[0]
    assert sorted(buffer.raw().nbytes for buffer in memory) == sorted(
        (8 * TASK.layout.integers, 4 * TASK.layout.size)
    )
    assert len(words) < 4000, "a method travels without its state and the model"
    assert len(got) == 4, "two shares for each of two actors"
    assert all(memoryview(buffer).readonly for _, memory in got for buffer in memory), (
        "they stay in the object store"
    )


def test_tensors_of_every_kind_travel() -> None:
    rows = torch.arange(6.0).view(2, 3)
    message: dict[str, Any] = {
        "rows": rows,
        "turned": rows.T,
        "expanded": rows[:1].expand(4, 3),
        "half": rows.bfloat16(),
        "true": rows > 2,
        "bytes": rows.to(torch.uint8),
        "whole": rows.long(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "array": rows.numpy() + 1,
        "text": "as it is",
    }
    tensors = load(*dump(message))
    assert tensors["expanded"].stride()[0] == 0, "sent once"
    assert np.array_equal(tensors.pop("array"), message.pop("array"))
    assert tensors.pop("text") == message.pop("text")
    for name, tensor in message.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


# --- deaths and failures ---


@pytest.mark.minutes
def test_actors_that_start_slowly_are_waited_for_and_a_line_says_so(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow start of an actor causes a notice and no error.

    The process of the new actor is stopped until all limits in seconds have passed.
    """
    monkeypatch.setattr(driver, "NOTICE_SECONDS", 0.5)
    monkeypatch.setattr(driver, "GROWTH_SECONDS", 0.5)
    with stopped(
        lambda name: name.startswith("ray::") and "Agent" not in name, spared={*engine.processes}
    ) as paused:
        slow = RayEngine(TASK, workers=1)
        algorithm = set_up(slow, FedAvg())
        waking = threading.Timer(4.0, paused.wake)
        waking.start()
        assert len(list(slow.train(algorithm, *jobs(slow)))) == CLIENTS
        assert set(slow.processes) <= paused.processes
        waking.join()
    slow.close()
    assert any("no Ray actor has started in" in record.message for record in caplog.records)


def test_actors_that_no_node_has_room_for_are_not_waited_for(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = RayEngine(TASK, workers=1)
    monkeypatch.setattr(starved, "gpus", 3)
    starved._handles.pop().end()
    with pytest.raises(FedloomError, match="no Ray actor can start: each needs") as caught:
        list(starved.train(set_up(starved, FedAvg()), *jobs(starved)))
    assert "\n" not in str(caught.value)
    starved.close()


# --- user settings ---


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nowhere", "address 'nowhere' is not allowed: use local, auto, 'host:port'"),
        ("ray://127.0.0.1:99999", "is not allowed"),
        (
            "ray://127.0.0.1:1",
            "cannot reach the cluster at 'ray://127.0.0.1:1': connection refused",
        ),
        (
            "ray://nowhere.invalid:10001",
            "cannot reach the cluster at 'ray://nowhere.invalid:10001'",
        ),
    ],
)
def test_an_address_without_a_cluster_is_told_in_one_line(
    address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_current", None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(FedloomError) as caught:
        RayEngine(TASK, address=address)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_process_has_one_cluster_at_a_time(engine: RayEngine) -> None:
    with pytest.raises(
        InvalidValue,
        match=r"'10.0.0.1:6379': this process is connected to another Ray cluster \(local\)",
    ):
        RayEngine(TASK, address="10.0.0.1:6379")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"engine 'ray' needs 'ray': pip install -e '.\[ray\]'"):
        RayEngine(TASK)


def test_an_address_and_a_number_of_actors_do_not_make_another_run() -> None:
    assert read_engine("ray://host:10001")[1] == {"address": "ray://host:10001"}
    assert without_placement("ray://host:10001") == "ray"
    assert without_placement("ray(workers=4, gpus=0.5, address='host:6379')") == "ray"
    assert without_placement("ray(workers=4, inside=stacked)") == "ray(inside='stacked')"
    assert without_placement("rows") == "rows"


JOB = """
algorithm = "fedmr"
rounds = 3
participation = 0.5
model = "logistic"
engine = "ray(workers=1)"
threads = 1
[data]
clients = 4
partition = "iid"
"""


def test_the_command_runs_on_ray_and_goes_on_elsewhere(
    engine: RayEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["run", "job.toml"]) == 0
    captured = capsys.readouterr()
    assert "3 rounds" in captured.out
    assert "ray" not in captured.err.lower()
    assert main(["run", "job.toml", "engine=ray(workers=2)"]) == 0  # the run is already finished
    monkeypatch.chdir(tmp_path.parent)
    assert (
        main(["run", str(tmp_path / "job.toml"), "engine=rows", f"directory={tmp_path / 'rows'}"])
        == 0
    )
    log, expected_log = (
        next((tmp_path / name).glob("**/metrics.jsonl")) for name in ("runs", "rows")
    )
    assert log.read_text() == expected_log.read_text()


# --- no processes or files remain ---


@pytest.mark.minutes
def test_a_program_keeps_its_own_cluster_and_one_started_for_it_goes_when_it_is_closed(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory(prefix="r") as short:  # short path for Ray's sockets
        command = [sys.executable, "-W", "error", str(tmp_path / "script.py"), short]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        assert len(line.split()) >= 2, done.stdout
        assert gone(int(word) for word in line.split())


KILLED = """
import sys
from fedloom.engines.choose import make_engine
from small_task import small_task

engine = make_engine("ray", small_task(), workers=1)
print(*engine.processes, flush=True)
sys.stdin.read()
"""


def test_a_node_that_has_died_ends_the_run_with_how_to_go_on(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead node causes an error with instructions.

    Ray may keep this process alive, but its actors do not answer.
    """
    algorithm = set_up(engine, FedAvg())
    list(engine.train(algorithm, *jobs(engine)))
    monkeypatch.setattr(engine.session, "raylet", SimpleNamespace(is_running=lambda: False))
    monkeypatch.setattr(engine._ray, "wait", lambda calls, **_: ([], calls))
    with pytest.raises(
        FedloomError, match="repeat the command to continue from the last checkpoint"
    ) as caught:
        list(engine.train(algorithm, *jobs(engine)))
    assert "\n" not in str(caught.value)


@pytest.mark.minutes
def test_a_killed_program_leaves_no_actor_and_no_folder_was_open_to_others() -> None:
    path = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": folder}
        command = [sys.executable, "-c", KILLED]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program:
            assert program.stdout is not None
            actors = [int(word) for word in program.stdout.readline().split()]
            assert len(actors) == 1
            modes = [
                stat.S_IMODE(entry.stat().st_mode) for entry in Path(folder).glob("fedloom-ray-*")
            ]
            program.kill()
        assert modes == [0o700]
        assert gone_soon(actors), "an actor outlived the program"


ACTOR = """
import os
from fedloom.engines.worker_life import exit_with_parent

child = os.fork()
if child:
    os.waitpid(child, 0)
exit_with_parent()
print(os.getpid(), flush=True)
while True:
    pass
"""


def test_an_actor_ends_at_once_with_what_started_it_whatever_it_does() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        actor = int(program.stdout.readline())
        program.kill()
    try:
        assert gone_soon([actor])
    finally:
        with suppress(ProcessLookupError):
            os.kill(actor, signal.SIGKILL)


@pytest.mark.parametrize(("kind", "arguments"), [(TrainingActor, ((), 1, False)), (EventBoard, ())])
def test_actors_watch_what_started_them_before_all_else(
    kind: type, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun() -> None:
        raise InterruptedError

    monkeypatch.setattr(f"{kind.__module__}.exit_with_parent", begun)
    with pytest.raises(InterruptedError):
        kind(*arguments)
