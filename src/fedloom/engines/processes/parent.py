"""The processes engine: worker processes on this machine train the clients, and models are kept in shared memory."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.fields import Count, checked
from fedloom.engines.base import engines
from fedloom.engines.client_work import Answers, Setup, slim
from fedloom.engines.dispatch import (
    WorkerDied,
    WorkerEngine,
    WorkerHandle,
    Workers,
    end_all,
    grouped,
)
from fedloom.engines.pickling import load
from fedloom.engines.processes.channel import Channel, Parcel, pack
from fedloom.engines.processes.shared_memory import SharedMemory
from fedloom.engines.processes.worker import VARIABLE
from fedloom.engines.stacked import apart
from fedloom.errors import FedloomError, InvalidValue
from fedloom.local.proof import Proof
from fedloom.rounds.engine import ClientTask
from fedloom.state.store import BUDGET
from fedloom.task import Task

_PROGRAM = "from fedloom.engines.processes.worker import main; main()"


@engines.register("processes")
class ProcessesEngine(WorkerEngine):
    """Trains clients in `workers` processes of `threads` threads each, with the numbers of the rows engine on as many threads.

    The workers start once and stay. They read the task's data, the models they are sent and the clients' memory from shared
    memory, and write trained models into one shared matrix, so no model is pickled. A free worker is given the remaining client
    with the most samples.

    With `inside="stacked"` a worker is given several clients of similar sizes, which train in lock step as in the stacked
    engine, with the numbers of the rows engine to float tolerance; `chunk` is the most, by default what suits the processor.
    Clients still train one by one where the model or the method cannot be stacked.

    The task's training samples are moved into shared memory, so there is one copy of them.
    `memory_budget`: bytes of client memory kept in this process; beyond it, the least recently used clients go to files.
    `proof`: which shortcuts the task allows, stacks included, where that is known already.

    Raises `InvalidValue` for numbers out of range, a task that is not on the CPU, or something in it that cannot be pickled;
    `FedloomError` inside a worker, and where no worker can start.
    """

    name = "processes"
    kind = "worker process"
    shares_memory = True
    in_process: bool | None = False

    def __init__(
        self,
        task: Task,
        proof: Proof | None = None,
        *,
        workers: Workers = 2,
        threads: Workers = 1,
        memory_budget: int = BUDGET,
        inside: Literal["rows", "stacked"] = "rows",
        chunk: Count | None = None,
    ) -> None:
        checked(ProcessesEngine, {"workers": workers, "threads": threads, "inside": inside, "chunk": chunk})
        if os.name != "posix":
            raise InvalidValue("engine 'processes' needs a POSIX system: use engine 'rows'")
        if VARIABLE in os.environ:
            raise FedloomError(
                "a worker process began the run anew: put what starts it below if __name__ == '__main__':"
            )
        super().__init__(workers, inside, memory_budget)
        self.threads, self.wanted_chunk = threads, chunk
        self._proven = (task, proof)
        self.shared_memory = SharedMemory()
        weakref.finalize(self, end_all, self._handles)
        self._start_missing()  # workers import PyTorch while the task is looked at
        try:
            self._announce(task)
        except BaseException:
            end_all(self._handles)
            raise

    def _setup_for(self, task: Task) -> Setup:
        if task.initial.is_cuda:
            raise InvalidValue(f"engine 'processes' works on the CPU, but the task is on {task.initial.device}")
        for tensor in (task.train.inputs, task.train.labels):
            if isinstance(tensor, Tensor) and self.shared_memory.find(tensor) is None:  # no lazy inputs
                tensor.data = self.shared_memory.place([tensor])[0]
        self.shared_memory.trim()
        proof, self.chunk = self._proof_and_chunk(task, self.wanted_chunk, self._proof_of(task))
        return Setup(slim(task), "rows" if self.chunk == 1 else "stacked", self.chunk, proof)

    def _proof_of(self, task: Task) -> Proof | None:
        """What is known of the task: a proof holds however many steps clients make."""
        other, proof = self._proven
        settings = replace(task.training, steps=other.training.steps)
        same = task.model is other.model and task.train is other.train and settings == other.training
        return proof if same else None

    def _start(self) -> WorkerHandle:
        return WorkerProcess(self.threads, self.shared_memory)

    def _wait(self, handles: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        lines = {handle.channel.connection: handle for handle in handles if isinstance(handle, WorkerProcess)}
        return [lines[line] for line in wait(list(lines)) if isinstance(line, Connection)]

    def _pack(self, message: object, known: Mapping[int, int]) -> Parcel:
        return pack(message, self.shared_memory, known)

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return self.shared_memory.empty([shape], [self.task.layout.dtype])[0]

    def _groups(self, algorithm: Algorithm, client_tasks: Sequence[ClientTask]) -> list[list[ClientTask]]:
        """The same number of groups for every worker, so that all finish at about the same time."""
        most = 1 if apart(algorithm) else self.chunk
        count = self.workers * math.ceil(len(client_tasks) / (self.workers * most))
        return grouped(client_tasks, self._sizes(client_tasks), count, most)

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers."""
        return [handle.process.pid for handle in self._handles if isinstance(handle, WorkerProcess)]


class WorkerProcess(WorkerHandle):
    """A worker process, which sends a message when it has started. The main program is not run again in it."""

    def __init__(self, threads: int, memory: SharedMemory) -> None:
        super().__init__()
        ours, theirs = Pipe()
        descriptor = theirs.fileno()
        paths = [path or os.getcwd() for path in sys.path]
        surroundings = {
            **os.environ,
            VARIABLE: "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(descriptor), str(threads)],
            stdin=subprocess.DEVNULL,
            env=surroundings,
            pass_fds=[descriptor],
            process_group=0,  # Ctrl-C in a terminal is for this process alone
        )
        theirs.close()
        self.channel = Channel(ours, memory)
        self._sent: Any = None  # its tensors must not be freed before the answer has arrived

    def send(self, method: str, message: Any) -> None:
        self._sent = message
        with contextlib.suppress(OSError):
            self.channel.send(method, message)

    def receive(self) -> Answers | Exception:
        try:
            _, packed = self.channel.receive()
        except (EOFError, OSError):
            raise WorkerDied(self._ending()) from None
        self._sent = None
        answers: Answers | Exception = load(*packed)
        return answers

    def end(self) -> None:
        self._sent = None
        self.channel.connection.close()
        self.process.kill()
        self.process.wait()

    def _ending(self) -> str:
        """How the process ended (its end of the pipe is closed)."""
        code = self.process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
