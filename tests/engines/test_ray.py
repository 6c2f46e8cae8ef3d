"""The Ray engine gives the numbers of the rows engine after any failure.

It leaves no processes or files. Two actors on a local cluster serve all tests. test_places.py
compares the methods with other engines.
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
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine_support import (
    CLIENTS,
    TASK,
    assert_errors_name_clients,
    assert_same,
    jobs,
    run,
    set_up,
)
from fedloom.algorithms.fedavg import FedAvg
from fedloom.cli import main
from fedloom.common.errors import FedloomError, InvalidValue, MissingExtra
from fedloom.engines.choose import make_engine, read_engine, without_placement
from fedloom.engines.client_work import ClientResult, WorkDone
from fedloom.engines.dispatch import MOST_WORKERS
from fedloom.engines.pickling import dump, load
from fedloom.engines.ray import driver, session
from fedloom.engines.ray.actor import TrainingActor
from fedloom.engines.ray.driver import ActorHandle, RayEngine
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.engine import Answer
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.study.run_process import EventBoard
from fedloom.task import Task
from fedloom.task.making import make_task
from objective_support import KINDS, make
from process_support import Deadly, Failing, Misconfigured, Peeking
from ray_support import SCRIPT, Echoing, gone, gone_soon, stopped
from small_task import KeepsClientMemory, small_task

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


# --- equal numbers ---


def test_statistics_dropout_and_new_clients_are_the_same_to_the_bit(engine: RayEngine) -> None:
    options: dict[str, Any] = {"personal_every": 1, "new_clients": 0.34, "dropout": 0.2}
    federation = run(KeepsClientMemory(), engine, **options)
    assert "new_client_accuracy" in federation.history[-1]
    assert any(record["faults"] for record in federation.history)
    assert_same(federation, run(KeepsClientMemory(), RowsEngine(TASK), **options))


def test_actors_may_stack_their_clients(engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "inside", "stacked")
    engine.begin(digits(), None)
    options: dict[str, Any] = {"task": digits(), "rounds": 2, "personal_every": 2}
    federation = run(build("scaffold"), engine, **options)
    assert_same(federation, run(build("scaffold"), RowsEngine(digits()), **options), tolerance=1e-5)


def test_actors_fold_whole_blocks_to_the_same_bits(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.algorithm.records.MOST_SLOTS", 1)
    received, listen = [], ActorHandle.receive

    def noted(self: ActorHandle) -> Any:
        received.append(listen(self))
        return received[-1]

    monkeypatch.setattr(ActorHandle, "receive", noted)
    assert_same(run(KeepsClientMemory(), engine), run(KeepsClientMemory(), RowsEngine(TASK)))
    done = [answer for answer in received if isinstance(answer, WorkDone)]
    answers = [answer for answer in done if answer.folded is not None]
    assert len(answers) == 3 * len(TASK.partition)
    assert all(
        not result.tensors
        for answer in answers
        for result in answer.results
        if isinstance(result, ClientResult)
    )


def test_a_run_goes_on_from_its_checkpoint(engine: RayEngine, tmp_path: Path) -> None:
    schedule = Schedule(rounds=4, participation=1.0, seed=3, evaluate_every=1)
    halted = Federation(KeepsClientMemory(), TASK, engine, schedule, tmp_path)
    halted.step()
    halted.step()
    halted.save()
    resumed = Federation(KeepsClientMemory(), TASK, engine, schedule, tmp_path)
    assert resumed.finished == 2
    resumed.run()
    assert_same(resumed, run(KeepsClientMemory(), RowsEngine(TASK), rounds=4))


def test_tasks_of_other_types_give_the_numbers_of_the_rows_engine(engine: RayEngine) -> None:
    small = small_task()
    double = replace(
        small,
        model=small.model.double(),
        train=replace(small.train, inputs=small.train.inputs.double()),
    )
    double = replace(double, test=replace(small.test, inputs=small.test.inputs.double()))
    assert_same(
        run(KeepsClientMemory(), engine, task=double),
        run(KeepsClientMemory(), RowsEngine(double), task=double),
    )
    assert engine.store.read(0)["rounds"].dtype == torch.int64


@pytest.mark.parametrize("kind", KINDS)
def test_every_objective_gives_the_bits_of_the_rows_engine(engine: RayEngine, kind: str) -> None:
    task = make(kind, local_test=0.25)
    options: dict[str, Any] = {"task": task, "rounds": 2, "personal_every": 1}
    on_ray, on_rows = (
        run(KeepsClientMemory(), chosen, **options) for chosen in (engine, RowsEngine(task))
    )
    assert_same(on_ray, on_rows)
    measure = task.objective.metric.name
    assert {measure, f"client_{measure}", f"personal_{measure}_worst"} <= on_ray.history[-1].keys()


def test_replies_may_be_written_to_even_where_they_are_what_was_sent(engine: RayEngine) -> None:
    algorithm = set_up(engine, Echoing())
    replies = [
        answer for answer in engine.train(algorithm, *jobs(engine)) if isinstance(answer, Answer)
    ]
    assert len(replies) == CLIENTS
    models = [reply.tensors["model"].clone() for reply in replies]
    for reply in replies:
        reply.tensors["model"].zero_()
    repeated = {
        reply.job.client: reply
        for reply in engine.train(algorithm, *jobs(engine))
        if isinstance(reply, Answer)
    }
    for reply, model in zip(replies, models, strict=True):
        assert torch.equal(repeated[reply.job.client].tensors["model"], model)


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


@pytest.mark.minutes
def test_an_actor_killed_in_a_round_is_replaced_and_its_clients_train_again(
    engine: RayEngine, tmp_path: Path
) -> None:
    list(engine.train(set_up(engine, FedAvg()), *jobs(engine)))
    processes = set(engine.processes)
    federation = run(Deadly(victim=2, times=1, directory=str(tmp_path)), engine)
    (died,) = ({int(mark.name)} for mark in tmp_path.iterdir())
    assert died < processes
    assert not died & set(engine.processes)
    assert_same(federation, run(KeepsClientMemory(), RowsEngine(TASK)))


def test_an_actor_killed_between_two_rounds_is_replaced(engine: RayEngine) -> None:
    federation = Federation(KeepsClientMemory(), TASK, engine, Schedule(3, 1.0, 3, 1))
    federation.step()
    killed = engine.processes[0]
    os.kill(killed, signal.SIGKILL)
    federation.run()
    assert killed not in engine.processes
    assert_same(federation, run(KeepsClientMemory(), RowsEngine(TASK)))


@pytest.mark.minutes
def test_a_client_that_keeps_killing_its_actor_fails_and_the_others_do_not(
    engine: RayEngine, tmp_path: Path
) -> None:
    federation = run(Deadly(victim=2, times=3, directory=str(tmp_path)), engine, rounds=1)
    (fault,) = federation.history[0]["faults"]
    assert fault["client"] == 2
    assert fault["reason"].startswith("its Ray actor died 3 times (")
    assert "\n" not in fault["reason"]
    assert [client for client in range(CLIENTS) if engine.store.read(client)] == [0, 1, 3, 4, 5]


def test_clients_that_fail_are_named_with_the_reasons_of_the_rows_engine(engine: RayEngine) -> None:
    federation = run(Failing(), engine)
    assert {fault["client"] for fault in federation.history[0]["faults"]} == {0, 1, 2, 3}
    assert_same(federation, run(Failing(), RowsEngine(TASK)))


def test_errors_name_the_clients_and_the_round(engine: RayEngine) -> None:
    assert_errors_name_clients(engine)


def test_a_wrong_setting_ends_the_round_and_leaves_the_engine_usable(engine: RayEngine) -> None:
    with pytest.raises(InvalidValue, match="mu must be at least 0, not -1"):
        run(Misconfigured(), engine)
    assert_same(run(FedAvg(), engine), run(FedAvg(), RowsEngine(TASK)))


def test_the_servers_state_does_not_reach_clients(engine: RayEngine) -> None:
    with pytest.raises(AttributeError, match="state"):
        run(Peeking(), engine, rounds=1)


def test_a_round_left_early_disturbs_nothing(engine: RayEngine) -> None:
    results = engine.train(set_up(engine, KeepsClientMemory()), *jobs(engine))
    assert isinstance(next(results), Answer)
    results.close()  # type: ignore[attr-defined]
    assert not any(handle.group for handle in engine._handles)
    assert_same(run(KeepsClientMemory(), engine), run(KeepsClientMemory(), RowsEngine(TASK)))


# --- user settings ---


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rya", "did you mean 'ray'"),
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
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(FedloomError, match=reason) as caught:
        make_engine(text, TASK)
    assert "\n" not in str(caught.value)


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


def test_what_cannot_travel_is_refused_in_one_line(engine: RayEngine) -> None:
    method = FedAvg()
    method.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(
        InvalidValue, match="engine 'ray' cannot send this to its workers: "
    ) as caught:
        run(method, engine)
    assert "\n" not in str(caught.value)


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
