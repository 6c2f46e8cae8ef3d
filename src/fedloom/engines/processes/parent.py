"""The processes engine: worker processes on this machine train clients in shared memory."""

import contextlib
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Literal

import torch
from torch import Tensor

from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.common.fields import Count, checked
from fedloom.engines.base import engines
from fedloom.engines.client_work import Setup, WorkDone
from fedloom.engines.dispatch import (
    WorkerDied,
    WorkerEngine,
    WorkerHandle,
    Workers,
    end_all,
    grouped,
)
from fedloom.engines.pickling import load
from fedloom.engines.processes.channel import Channel, Parcel, SharedMemory, anonymous_file, pack
from fedloom.engines.processes.worker import VARIABLE
from fedloom.engines.proof import Proof
from fedloom.engines.stacked import unstackable_method
from fedloom.engines.worker_life import STARTS_WORKERS, exit_text, start_worker
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Job
from fedloom.state.store import BUDGET
from fedloom.task import Task

_PROGRAM = "from fedloom.engines.processes.worker import main; main()"


@engines.register("processes")
class ProcessesEngine(WorkerEngine):
    """Trains clients in worker processes. Results are equal to `rows` with the same threads.

    The workers start once. The task's training samples are moved into shared memory. The workers
    read data, received models and the clients' memory from shared memory, and write trained models
    into a shared matrix, so no model is pickled. A free worker gets the waiting client with the
    most samples.

    Args:
        task: Data, model and local training, on the CPU.
        proof: Shortcuts that the task allows, including stacks, if they were proven before.
        workers: Number of processes.
        threads: Number of threads per process.
        memory_budget: Bytes of client memory in this process.
        inside: With `stacked`, a worker trains several clients of similar sizes in lock step.
            Results are then equal to `rows` to float tolerance. Clients train one by one if the
            model or the method cannot be stacked.
        chunk: Largest number of clients in a stack. By default it depends on the processor.

    Raises:
        InvalidValue: If a number is out of range, the task is not on the CPU, or a part of the task
            cannot be pickled.
        FedloomError: If no worker can start, or this process is a worker itself.
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
        checked(
            ProcessesEngine,
            {"workers": workers, "threads": threads, "inside": inside, "chunk": chunk},
        )
        if not STARTS_WORKERS:
            remedy = "use engine = 'rows' or 'stacked'"
            raise InvalidValue(f"engine 'processes' needs Linux or macOS: {remedy}")
        if chunk is not None and inside == "rows":
            raise InvalidValue(
                f"chunk = {chunk} is a number of models in a stack: set inside = stacked too"
            )
        if VARIABLE in os.environ:
            remedy = "put the code that starts the run under if __name__ == '__main__':"
            raise FedloomError(f"a worker process has started the run again: {remedy}")
        super().__init__(workers, inside, memory_budget)
        self.threads = threads
        self.wanted_chunk = chunk
        self._proven = (task, proof)
        self.shared_memory = SharedMemory(anonymous_file())
        weakref.finalize(self, end_all, self._handles)
        self._start_missing()  # workers import PyTorch meanwhile
        try:
            self._set_task(task)
        except BaseException:
            end_all(self._handles)
            raise

    def _setup_for(self, task: Task) -> Setup:
        for tensor in (task.train.inputs, task.train.labels):
            # Lazy inputs are not tensors.
            if isinstance(tensor, Tensor) and self.shared_memory.find(tensor.data_ptr()) is None:
                tensor.data = self.shared_memory.empty(tensor.shape, tensor.dtype).copy_(tensor)
        proven, proof = self._proven
        # The proof does not depend on the number of steps.
        settings = replace(task.training, steps=proven.training.steps)
        applies = (
            task.model is proven.model
            and task.train is proven.train
            and settings == proven.training
        )
        setup = self._proven_setup(task, self.wanted_chunk, proof if applies else None)
        self.chunk = setup.chunk or 1
        return setup

    def _start(self) -> WorkerHandle:
        return WorkerProcess(self.threads, self.shared_memory)

    def _wait(self, handles: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        lines = {
            handle.channel.connection: handle
            for handle in handles
            if isinstance(handle, WorkerProcess)
        }
        return [lines[line] for line in wait(list(lines)) if isinstance(line, Connection)]

    def _pack(self, message: object, common: Mapping[int, int]) -> Parcel:
        return pack(message, self.shared_memory, common)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.shared_memory.empty(shape, dtype)

    def _groups(self, pipeline: Pipeline, jobs: Sequence[Job]) -> list[list[Job]]:
        """Split jobs into the same number of groups per worker, so that workers end together."""
        most = 1 if unstackable_method(pipeline.components()) else self.chunk
        count = self.workers * math.ceil(len(jobs) / (self.workers * most))
        return grouped(jobs, self._sizes(jobs), count, most)

    @property
    def processes(self) -> list[int]:
        """Process ids of the workers."""
        return [handle.process.pid for handle in self._handles if isinstance(handle, WorkerProcess)]


class WorkerProcess(WorkerHandle):
    """A worker process. It sends a message when it has started.

    It does not import the main program.
    """

    def __init__(self, threads: int, memory: SharedMemory) -> None:
        super().__init__()
        files = memory.descriptor, anonymous_file()
        environment = {VARIABLE: "1", "OMP_NUM_THREADS": str(threads)}
        self.process, connection = start_worker(_PROGRAM, threads, environment, files)
        self.channel = Channel(connection, memory, files[1])
        # Their tensors must not be freed before the answer has arrived.
        self._sent: tuple[Parcel | None, ...] = ()

    def send(self, setup: Parcel | None, assignment: Parcel | None, work: Parcel) -> None:
        self._sent = setup, assignment, work
        with contextlib.suppress(OSError):
            self.channel.send(*self._sent)

    def receive(self) -> WorkDone | Exception:
        try:
            ((data, memory),) = self.channel.receive()
        except (EOFError, OSError):
            raise WorkerDied(exit_text(self.process.wait())) from None
        self._sent = ()
        answers: WorkDone | Exception = load(data, memory)
        return answers

    def end(self) -> None:
        self._sent = ()
        self.channel.close()
        self.process.kill()
        self.process.wait()
