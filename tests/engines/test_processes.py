"""Shared memory, blocks of replies and the end of worker processes.

test_conformance.py compares results with other engines.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_support import CLIENTS, TASK, assert_same, jobs, run, set_up
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedmr import FedMR
from fedloom.common.errors import FedloomError
from fedloom.data.partition import Partition
from fedloom.engines.client_work import Setup
from fedloom.engines.pickling import load
from fedloom.engines.processes.channel import INLINE, Channel, SharedMemory, anonymous_file, pack
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.rounds.engine import Answer, Fault, FoldedBlock
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from process_support import Deadly
from ray_support import gone_soon
from small_task import TRAIN_SIZES, KeepsClientMemory, small_task


@pytest.fixture
def engine(worker_processes: ProcessesEngine) -> ProcessesEngine:
    worker_processes.begin(TASK, None)
    return worker_processes


# --- blocks of replies ---


def many_clients() -> Task:
    """Return the task with two samples for each client."""
    samples = len(TASK.train)
    indices = torch.arange(samples).numpy()
    return replace(TASK, partition=Partition.from_sizes(indices, [2] * (samples // 2)))


def test_replies_are_folded_block_by_block_and_few_blocks_are_begun(
    engine: ProcessesEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedloom.algorithm.records.MOST_SLOTS", 2)
    monkeypatch.setattr(engine, "workers_fold", False)
    many = many_clients()
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
    blocks = many.clients // 2
    assert len(created) == 2 * blocks  # for two rounds
    assert live <= 3 < blocks  # two workers, and two clients ahead per worker


def test_the_block_of_a_dead_worker_is_folded_in_this_process(
    engine: ProcessesEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedloom.algorithm.records.MOST_SLOTS", 2)
    many = many_clients()
    results: list[Answer | Fault | FoldedBlock] = []
    train = engine.train

    def noted(*arguments: Any, **options: Any) -> Any:
        for result in train(*arguments, **options):
            results.append(result)
            yield result

    monkeypatch.setattr(engine, "train", noted)
    method = Deadly(victim=9, times=1, directory=str(tmp_path))
    federation = run(method, engine, task=many, rounds=2)
    assert_same(federation, run(KeepsClientMemory(), RowsEngine(many), task=many, rounds=2))
    folded = [result for result in results if isinstance(result, FoldedBlock)]
    single = [result for result in results if isinstance(result, Answer) and result.tensors]
    assert (len(folded), len(single)) == (2 * (many.clients // 2) - 1, 2)


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
