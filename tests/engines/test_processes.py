"""The processes engine gives the numbers of the rows engine after any failure.

It leaves no processes or files after any kind of end.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_support import (
    CLIENTS,
    TASK,
    assert_errors_name_clients,
    assert_same,
    jobs,
    run,
    set_up,
)
from every_method import EVERY_METHOD
from fedloom.algorithm.records import Message, uniform
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedmr import FedMR
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.common.round import Round
from fedloom.data.partition import Partition
from fedloom.engines.choose import make_engine
from fedloom.engines.client_work import Setup
from fedloom.engines.dispatch import MOST_WORKERS
from fedloom.engines.pickling import load
from fedloom.engines.processes.channel import INLINE, Channel, SharedMemory, anonymous_file, pack
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.rounds.engine import Answer, Fault, FoldedBlock
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from process_support import Deadly, Failing, Misconfigured, Peeking
from ray_support import gone_soon
from small_task import TRAIN_SIZES, KeepsClientMemory, small_task


@pytest.fixture
def engine(worker_processes: ProcessesEngine) -> ProcessesEngine:
    worker_processes.begin(TASK, None)
    return worker_processes


# --- equal numbers ---


@pytest.mark.parametrize("expression", EVERY_METHOD)
def test_methods_give_the_numbers_of_the_rows_engine(
    engine: ProcessesEngine, expression: str
) -> None:
    settings = {"personal_every": 2, "dropout": 0.2}
    federation = run(build(expression), engine, **settings)
    assert_same(federation, run(build(expression), RowsEngine(TASK), **settings))
    assert federation.client_history


def test_new_clients_are_evaluated_alike(engine: ProcessesEngine) -> None:
    settings = {"personal_every": 1, "new_clients": 0.34}
    federation = run(KeepsClientMemory(), engine, **settings)
    assert "new_client_accuracy" in federation.history[-1]
    assert_same(federation, run(KeepsClientMemory(), RowsEngine(TASK), **settings))


def test_a_run_goes_on_from_its_checkpoint(engine: ProcessesEngine, tmp_path: Path) -> None:
    schedule = Schedule(rounds=4, participation=1.0, seed=3, evaluate_every=1)
    halted = Federation(KeepsClientMemory(), TASK, engine, schedule, tmp_path)
    halted.step()
    halted.step()
    halted.save()
    resumed = Federation(KeepsClientMemory(), TASK, engine, schedule, tmp_path)
    assert resumed.finished == 2
    resumed.run()
    assert_same(resumed, run(KeepsClientMemory(), RowsEngine(TASK), rounds=4))


def test_tasks_of_other_types_give_the_numbers_of_the_rows_engine(engine: ProcessesEngine) -> None:
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


def test_replies_are_folded_block_by_block_and_few_blocks_are_begun(
    engine: ProcessesEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedloom.algorithm.records.MOST_SLOTS", 2)
    monkeypatch.setattr(engine, "workers_fold", False)
    samples = len(TASK.train)
    many = replace(
        TASK, partition=Partition.from_sizes(torch.arange(samples).numpy(), [2] * (samples // 2))
    )
    created: list[weakref.ref[Tensor]] = []
    live, empty = 0, engine._empty

    def counted(shape: Any, dtype: torch.dtype) -> Tensor:
        nonlocal live
        tensor = empty(shape, dtype)
        if dtype.is_floating_point:  # a few integers of each client remain
            created.append(weakref.ref(tensor))
        live = max(live, sum(reference() is not None for reference in created))
        return tensor

    monkeypatch.setattr(engine, "_empty", counted)
    federation = run(
        Deadly(victim=9, times=1, directory=str(tmp_path)), engine, task=many, rounds=2
    )
    assert_same(federation, run(KeepsClientMemory(), RowsEngine(many), task=many, rounds=2))
    blocks = samples // 4
    assert len(created) == 2 * blocks  # for two rounds
    assert live <= 3 < blocks  # two workers, and two clients ahead per worker


@pytest.mark.parametrize(
    ("method", "share"), [("deadly", 1.0), ("fedexp", 1.0), ("umf(scaffold)", 0.5)]
)
def test_blocks_are_folded_where_their_clients_train_to_the_same_bits(
    engine: ProcessesEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    share: float,
) -> None:
    monkeypatch.setattr("fedloom.algorithm.records.MOST_SLOTS", 2)
    samples = len(TASK.train)
    many = replace(
        TASK, partition=Partition.from_sizes(torch.arange(samples).numpy(), [2] * (samples // 2))
    )
    results: list[Answer | Fault | FoldedBlock] = []
    train = engine.train

    def noted(*arguments: Any, **options: Any) -> Any:
        for result in train(*arguments, **options):
            results.append(result)
            yield result

    monkeypatch.setattr(engine, "train", noted)
    folded = (
        Deadly(victim=9, times=1, directory=str(tmp_path)) if method == "deadly" else build(method)
    )
    plain = KeepsClientMemory() if method == "deadly" else build(method)
    federation = run(folded, engine, task=many, rounds=2, participation=share)
    assert_same(federation, run(plain, RowsEngine(many), task=many, rounds=2, participation=share))
    blocks = math.ceil(share * (samples // 2) / 2)
    blocks_folded = [result for result in results if isinstance(result, FoldedBlock)]
    single = [
        result
        for result in results
        if isinstance(result, Answer) and result.job.slot is not None and result.tensors
    ]
    assert (len(blocks_folded), len(single)) == (
        (2 * blocks - 1, 2) if method == "deadly" else (2 * blocks, 0)
    )


# --- deaths and failures ---


def test_a_worker_that_dies_is_replaced_and_its_client_trains_again(
    engine: ProcessesEngine, tmp_path: Path
) -> None:
    list(engine.train(set_up(engine, FedAvg()), *jobs(engine)))
    times = 2
    processes = set(engine.processes)
    federation = run(Deadly(victim=2, times=times, directory=str(tmp_path)), engine)
    died = {int(mark.name) for mark in tmp_path.iterdir()}
    assert len(died) == times
    assert died & processes
    assert not died & set(engine.processes)
    expected = run(KeepsClientMemory(), RowsEngine(TASK))
    assert_same(federation, expected)


def test_a_client_that_keeps_killing_its_worker_fails_and_the_others_do_not(
    engine: ProcessesEngine, tmp_path: Path
) -> None:
    method = Deadly(victim=2, times=3, directory=str(tmp_path))
    federation = run(method, engine, rounds=1)
    assert federation.history[0]["faults"] == [
        {"client": 2, "reason": "its worker process died 3 times (killed by SIGKILL)"}
    ]
    assert [client for client in range(CLIENTS) if engine.store.read(client)] == [0, 1, 3, 4, 5]


def test_workers_killed_between_two_rounds_are_replaced(engine: ProcessesEngine) -> None:
    schedule = Schedule(rounds=3, participation=1.0, seed=3, evaluate_every=1)
    federation = Federation(KeepsClientMemory(), TASK, engine, schedule)
    federation.step()
    for process in engine.processes:
        os.kill(process, signal.SIGKILL)
    federation.run()
    assert_same(federation, run(KeepsClientMemory(), RowsEngine(TASK)))


def test_clients_that_fail_are_named_with_the_reasons_of_the_rows_engine(
    engine: ProcessesEngine,
) -> None:
    federation = run(Failing(), engine)
    position = federation.history[0]["clients"].index
    assert [fault["client"] for fault in federation.history[0]["faults"]] == sorted(
        (0, 1, 2, 3), key=position
    )
    assert_same(federation, run(Failing(), RowsEngine(TASK), participation=1.0))


def test_a_round_in_which_everybody_fails_raises_the_first_clients_error(
    engine: ProcessesEngine,
) -> None:
    with pytest.raises(ZeroDivisionError):
        run(Failing(), engine, rounds=1, participation=0.17, seed=_seed_that_selects(0))
    with pytest.raises(RuntimeError, match="1 and 2"):
        run(Failing(), engine, rounds=1, participation=0.17, seed=_seed_that_selects(1))


def _seed_that_selects(client: int) -> int:
    for seed in range(1000):
        if uniform(Round(1, 1, seed, CLIENTS, 1, 0.1, 0.1)) == (client,):
            return seed
    raise AssertionError("no seed selects the client")


def test_errors_name_the_clients_and_the_round(engine: ProcessesEngine) -> None:
    assert_errors_name_clients(engine)


def test_a_wrong_setting_ends_the_round_and_leaves_the_engine_usable(
    engine: ProcessesEngine,
) -> None:
    with pytest.raises(InvalidValue, match="mu must be at least 0, not -1"):
        run(Misconfigured(), engine)
    assert_same(run(FedAvg(), engine), run(FedAvg(), RowsEngine(TASK)))


def test_the_servers_state_does_not_reach_clients(engine: ProcessesEngine) -> None:
    with pytest.raises(AttributeError, match="state"):
        run(Peeking(), engine, rounds=1)


def test_a_round_left_early_disturbs_nothing(engine: ProcessesEngine) -> None:
    algorithm = set_up(engine, KeepsClientMemory())
    round, work = jobs(engine)
    results = engine.train(algorithm, round, work)
    assert isinstance(next(results), Answer)
    results.close()
    assert not any(handle.group for handle in engine._handles)
    assert_same(run(KeepsClientMemory(), engine), run(KeepsClientMemory(), RowsEngine(TASK)))


def test_clients_with_more_samples_go_first(
    engine: ProcessesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = set_up(engine, FedAvg())
    began: list[int] = []
    read = engine.store.read
    monkeypatch.setattr(
        engine.store, "read", lambda client: (began.append(client), read(client))[1]
    )
    assert len(list(engine.train(algorithm, *jobs(engine)))) == CLIENTS
    assert began == sorted(range(CLIENTS), key=lambda client: -TRAIN_SIZES[client])


def test_methods_that_cannot_travel_are_refused_in_one_line(engine: ProcessesEngine) -> None:
    method = FedAvg()
    method.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(
        InvalidValue, match="engine 'processes' cannot send this to its workers: "
    ) as caught:
        run(method, engine)
    assert "\n" not in str(caught.value)


def test_a_method_may_be_defined_inside_a_function(engine: ProcessesEngine) -> None:
    factor = 0.5

    class Inside(FedAvg):
        def train(self, cohort: Cohort, inbox: Message) -> Message:
            return {"model": super().train(cohort, inbox)["model"] * factor}

    assert_same(run(Inside(), engine), run(Inside(), RowsEngine(TASK)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"workers": 0}, f"processes: workers must be between 1 and {MOST_WORKERS}, not 0"),
        (
            {"workers": 100_000},
            f"processes: workers must be between 1 and {MOST_WORKERS}, not 100000",
        ),
        (
            {"threads": 100_000},
            f"processes: threads must be between 1 and {MOST_WORKERS}, not 100000.*",
        ),
        ({"threads": -1}, f"processes: threads must be between 1 and {MOST_WORKERS}, not -1"),
        ({"workers": 2.5}, "processes: workers must be a whole number, not 2.5"),
        ({"workers": True}, "processes: workers must be a whole number, not true"),
        ({"chunk": 4}, "chunk = 4 is a number of models in a stack: set inside = stacked too"),
        ({"threads": "all"}, "processes: threads must be a whole number, not 'all'"),
        ({"memory_budget": -1}, "memory_budget must be at least 0, not -1"),
        ({"worker": 2}, "processes has no parameter 'worker': .*"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidValue, match=f"^{reason}$"):
        make_engine("processes", TASK, **options)


# --- shared memory ---


def test_replies_and_samples_lie_in_shared_memory_and_regions_are_used_again(
    engine: ProcessesEngine,
) -> None:
    assert engine.shared_memory.find(engine.task.train.inputs.data_ptr()) is not None
    schedule = Schedule(rounds=12, participation=1.0, seed=3, evaluate_every=20)
    method = FedMR()
    federation = Federation(method, TASK, engine, schedule)
    for _ in range(4):
        federation.step()
    assert engine.shared_memory.find(method.state["pool"].data_ptr()) is not None
    regions = set(engine.shared_memory.regions)
    for _ in range(6):
        federation.step()
    assert set(engine.shared_memory.regions) == regions
    for _ in range(2):
        federation.step()
    filed = Federation(FedMR(), TASK, engine, replace(schedule, pool_budget=1000))
    filed.run()
    pool = filed.algorithm.state["pool"]
    assert engine.shared_memory.find(pool.data_ptr()) is None
    assert filed._pools.holds([pool])
    assert torch.equal(pool, method.state["pool"])


def test_replies_stay_as_they_are_when_later_rounds_run(engine: ProcessesEngine) -> None:
    algorithm = set_up(engine, KeepsClientMemory())
    round, work = jobs(engine)
    replies = [
        result for result in engine.train(algorithm, round, work) if not isinstance(result, Fault)
    ]
    copies = [reply.tensors["model"].clone() for reply in replies]
    assert len(replies) == CLIENTS
    for number in (2, 3, 4):
        assert len(list(engine.train(algorithm, replace(round, number=number), work))) == CLIENTS
    for reply, copy in zip(replies, copies, strict=True):
        assert torch.equal(reply.tensors["model"], copy)


def test_a_region_is_lent_again_when_its_last_tensor_is_gone() -> None:
    memory = SharedMemory(anonymous_file())
    floats = memory.empty([6], torch.float32).copy_(torch.arange(6.0))
    view = floats[2:4]
    start, size, offset = memory.find(floats.data_ptr()) or (0, 0, -1)
    assert offset == 0
    assert memory.find(view.data_ptr()) == (start, size, 8)
    assert memory.find(torch.ones(3).data_ptr()) is None
    del floats
    gc.collect()
    later = memory.empty([4], torch.float32)
    assert memory.find(later.data_ptr()) != (start, size, 0)
    assert view.tolist() == [2.0, 3.0]
    del view
    gc.collect()
    assert memory.find(memory.empty([4], torch.float32).data_ptr()) == (start, size, 0)


def channels() -> tuple[Channel, Channel]:
    ours, theirs = multiprocessing.Pipe()
    assert isinstance(ours, Connection)
    assert isinstance(theirs, Connection)
    near, far = SharedMemory(anonymous_file()), SharedMemory(anonymous_file())
    return Channel(ours, near, os.dup(far.descriptor)), Channel(
        theirs, far, os.dup(near.descriptor)
    )


TENSORS: dict[str, Tensor] = {
    "small": torch.arange(3, dtype=torch.float64),
    "large": torch.arange(INLINE, dtype=torch.float32).view(64, -1),
    "turned": torch.arange(INLINE, dtype=torch.int64).view(64, -1).T,
    "half": torch.ones(INLINE, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "truth": torch.arange(2 * INLINE) % 3 == 0,
    "empty": torch.empty(0, 4),
    "expanded": torch.arange(3.0).view(3, 1).expand(3, INLINE),
}


def test_tensors_of_every_kind_travel() -> None:
    sender, receiver = channels()
    regions = 0
    with closing(sender), closing(receiver):
        for _ in range(3):
            sender.send(pack({**TENSORS, "again": TENSORS["large"]}, sender.memory), None)
            message, nothing = receiver.receive()
            tensors = load(*message)
            assert nothing is None
            assert tensors["again"] is tensors["large"]
            for name, tensor in TENSORS.items():
                assert tensors[name].dtype == tensor.dtype
                assert torch.equal(tensors[name], tensor), name
                assert name == "turned" or tensors[name].stride() == tensor.stride(), name
            del tensors, message
            gc.collect()
            regions = regions or len(sender.memory.regions)
        assert len(sender.memory.regions) == regions


def test_a_tensor_in_shared_memory_is_written_to_from_the_other_end() -> None:
    sender, receiver = channels()
    with closing(sender), closing(receiver):
        ours = sender.memory.empty([3], torch.float32)
        sender.send(pack(ours, sender.memory))
        load(*receiver.receive()[0]).fill_(7)
        assert ours.tolist() == [7, 7, 7]


# --- no process outlives the parent ---

HEAD = """
import sys, time
import torch
from dataclasses import dataclass
from fedloom.algorithms.fedavg import FedAvg
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from small_task import small_task
torch.set_num_threads(1)

class Own(FedAvg):
    def train(self, cohort, inbox):
        time.sleep({seconds})
        return super().train(cohort, inbox)

def work(method):
    engine = ProcessesEngine(small_task(), workers={workers})
    federation = Federation(method, engine.task, engine, Schedule(rounds=2, participation=1.0))
    print(*engine.processes, flush=True)
    federation.step()
    print("trained", flush=True)
    federation.step()
"""


def script(directory: Path, tail: str, seconds: float = 0.0, workers: int = 1) -> list[str]:
    path = directory / "script.py"
    path.write_text(HEAD.format(seconds=seconds, workers=workers) + tail)
    return [sys.executable, "-W", "error", str(path)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
GUARDED = "if __name__ == '__main__':\n    work(Own())\n"


def shared_files() -> set[str]:
    """Return file names in shared memory.

    Semaphores are excluded, because other programs often create and delete them.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.parametrize("sent_signal", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent_however_it_ends(
    tmp_path: Path, sent_signal: signal.Signals
) -> None:
    original = shared_files()
    command = script(tmp_path, GUARDED, seconds=0.3, workers=2)
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(is_alive(worker) for worker in workers)
        assert parent.stdout.readline() == "trained\n"
        parent.send_signal(sent_signal)
        output = parent.stderr.read()
        assert parent.wait() == -sent_signal
    assert gone_soon(workers), "a worker outlived its parent"
    # only the traceback of the script
    assert output.count("Traceback") == (1 if sent_signal == signal.SIGINT else 0)
    assert "leaked" not in output
    assert "Warning" not in output
    assert shared_files() <= original


def is_alive(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_program_may_define_its_own_method_and_is_not_run_again_in_workers(
    tmp_path: Path,
) -> None:
    """The program needs neither a guard around the start of the run nor a file."""
    program = HEAD.format(seconds=0.0, workers=1) + "work(Own())\n"
    for command in (
        script(tmp_path, "work(Own())\n"),
        [sys.executable, "-W", "error", "-c", program],
    ):
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.stdout.endswith("trained\n")
        assert done.stdout.count("trained") == 1
        assert (done.returncode, done.stderr) == (0, "")


def test_settings_that_hold_already_are_not_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing settings are not set again.

    Setting deterministic algorithms imports PyTorch's compiler, and this takes as long as importing
    PyTorch.
    """
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    for deterministic in (False, True):
        Setup(TASK, deterministic=deterministic).make_engine(None)
    assert calls == [True]


def test_a_worker_does_not_start_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_WORKER", "1")
    with pytest.raises(FedloomError, match="under if __name__ == '__main__'"):
        ProcessesEngine(small_task())
