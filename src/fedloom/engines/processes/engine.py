"""The processes engine: worker processes train the clients, one by one or in stacks, on models that all share in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.fields import Count, checked
from fedloom.engines.base import Choice, ClientTask, Fault, KeepsClientMemory, Reply, engines, expectations
from fedloom.engines.groups import grouped
from fedloom.engines.processes.channel import Channel, Parcel, pack
from fedloom.engines.processes.shared import Pool
from fedloom.engines.processes.worker import (
    VARIABLE,
    Answers,
    Assignment,
    Briefing,
    Broken,
    Done,
    Failed,
    Setup,
    Share,
    Work,
    slim,
)
from fedloom.engines.stacked import StackedEngine, apart
from fedloom.errors import FedloomError, InvalidValue
from fedloom.round import Round
from fedloom.rounds.scoring import Tally
from fedloom.state.store import BUDGET, ClientStore
from fedloom.task import Task

ATTEMPTS = 3
"""A client whose worker dies so often fails."""

_PROGRAM = "from fedloom.engines.processes.worker import main; main()"


@engines.register("processes")
class ProcessesEngine(KeepsClientMemory):
    """Trains clients in `workers` processes of `threads` threads each, with the numbers of the rows engine on as many threads.

    The workers start once and stay. They read the task's data, the models that are sent and what clients remember in memory
    shared with this process, and write trained models into one shared matrix, so that no model is pickled. Each free worker is
    given the waiting client with the most samples. What a client does depends on the round, the seed, its number, its inbox and
    its memory alone, and its memory changes here, when its reply is in: so when a worker dies it is replaced, and its client
    trains again with the same result. A client whose worker dies three times fails, and says so.

    With `inside="stacked"` a worker is given several clients of like sizes, which advance in lock step as in the stacked engine,
    with the numbers of the rows engine to float tolerance; `chunk` is how many at most, by default what suits the processor.
    When its worker dies, each of them trains again by itself. Where models or methods cannot be stacked, clients train one by
    one all the same.

    The task's training samples are moved into shared memory, so that they are held once.
    `memory_budget`: bytes of client memory kept here; the clients not used for longest spill to files beyond it.

    Raises `InvalidValue` for numbers out of range, a task that is not on the CPU, or something in it that cannot be pickled,
    such as a model class defined inside a function; `FedloomError` inside a worker, and where no worker can start.
    """

    chosen: Choice | None = None  # how it came to be this engine, where `make_engine` made it

    def __init__(
        self,
        task: Task,
        *,
        workers: Count = 2,
        threads: Count = 1,
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
        self.workers, self.threads, self.inside = workers, threads, inside
        self._wanted_chunk = chunk
        self.store = ClientStore(budget=memory_budget)
        self.pool = Pool()
        self._crew: list[_Worker] = []
        self._failed_starts = 0
        weakref.finalize(self, _dismiss, self._crew)
        self._setup = pack(Setup.of_this_process(), self.pool)
        self._share(task)
        self._hire()

    def begin(self, task: Task, directory: Path | None) -> None:
        if task is not self.task or self.inside != self._told_inside:
            self._share(task)
        self.store.begin(directory)

    def _share(self, task: Task) -> None:
        if task.initial.is_cuda:
            raise InvalidValue(f"engine 'processes' works on the CPU, but the task is on {task.initial.device}")
        for tensor in (task.train.inputs, task.train.labels):
            if self.pool.find(tensor) is None:
                tensor.data = self.pool.place([tensor])[0]
        self.task, self._told_inside = task, self.inside
        self.chunk = self._chunk_for(task)
        self._briefing = self._pack(Briefing(slim(task), self.chunk))
        self.pool.trim()

    def _chunk_for(self, task: Task) -> int:
        """How many clients a worker may be given at a time; one where models of this task cannot be stacked."""
        if self.inside == "rows":
            return 1
        stack = StackedEngine(task, chunk=self._wanted_chunk)
        return 1 if stack.unstackable else stack.chunk

    # --- the work of a round ---

    def train(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Reply | Fault]:
        expected = expectations(algorithm, round, self.task.layout)
        matrices = self._matrices(expected, round, client_tasks)

        def share(client_task: ClientTask, inbox: dict[str, Tensor]) -> Share:
            uploads = client_task.slot is not None
            places = {name: matrix[client_task.slot] for name, matrix in matrices.items()} if uploads else {}
            return Share(client_task.client, client_task.slot, inbox, self.store.read(client_task.client), places)

        for client_task, answer in self._results("train", Assignment(algorithm, round, expected), client_tasks, share):
            if isinstance(answer, Done):
                if answer.written:
                    self.store.write(client_task.client, answer.written)
                placed = {name: matrices[name][client_task.slot] for name in answer.placed}
                yield Reply(client_task, {**placed, **answer.tensors}, answer.metrics, matrices)
            else:
                assert isinstance(answer, Failed)
                yield Fault(client_task, answer.reason, answer.error)

    def evaluate(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Tally]:
        if self.task.local_test is None:
            raise InvalidValue("the clients have no test data of their own: give the task local_test, such as 0.25")

        def share(client_task: ClientTask, inbox: dict[str, Tensor]) -> Share:
            return Share(client_task.client, client_task.slot, inbox, self.store.read(client_task.client), {})

        for _, answer in self._results("evaluate", Assignment(algorithm, round, {}), client_tasks, share):
            if isinstance(answer, Failed) and answer.error is not None:
                raise answer.error
            assert isinstance(answer, Tally)
            yield answer

    def _matrices(
        self, expected: Mapping[str, tuple[int, ...]], round: Round, client_tasks: Sequence[ClientTask]
    ) -> dict[str, Tensor]:
        """One row for each slot, `[slots, ...]`, for every tensor expected, in the type of the model."""
        slots = max(
            [
                len(round.selected),
                *(client_task.slot + 1 for client_task in client_tasks if client_task.slot is not None),
            ]
        )
        shapes = [(slots, *shape) for shape in expected.values()]
        return {
            name: self.pool.empty([shape], [self.task.layout.dtype])[0]
            for name, shape in zip(expected, shapes, strict=True)
        }

    def _results(
        self,
        kind: Literal["train", "evaluate"],
        assignment: Assignment,
        client_tasks: Sequence[ClientTask],
        share: Callable[[ClientTask, dict[str, Tensor]], Share],
    ) -> Iterator[tuple[ClientTask, Done | Failed | Tally]]:
        """Every answer as it comes. Leaving early ends the workers that are busy, since they write to shared memory."""
        self._dismiss_busy()
        told = self._pack(assignment)
        shared = self._shared_inbox(client_tasks)
        waiting = deque(self._groups(assignment.algorithm, client_tasks))
        deaths: Counter[int] = Counter()

        def give(worker: _Worker) -> None:
            group = waiting.popleft()
            inboxes = [
                {name: shared.get(id(rows), rows) for name, rows in client_task.inbox.items()} for client_task in group
            ]
            work = Work(
                kind, tuple(share(client_task, inbox) for client_task, inbox in zip(group, inboxes, strict=True))
            )
            try:
                worker.begin(self._briefing, told, group, self._pack(work))
            except OSError:  # it died while it had nothing to do
                waiting.appendleft(group)
                self._crew.remove(worker)
                worker.end()

        try:
            while waiting or any(worker.group for worker in self._crew):
                if waiting:
                    self._hire()
                for worker in [worker for worker in self._crew if worker.ready and not worker.group]:
                    if waiting:
                        give(worker)
                for worker in self._speaking():
                    group = worker.group
                    answers = self._listen(worker)
                    if not group:
                        continue
                    if answers is not None:
                        if waiting:
                            give(worker)  # before the answers are dealt with, so that the worker does not wait for that
                        yield from zip(group, answers, strict=True)
                        continue
                    deaths[id(group[0])] += len(group) == 1
                    if deaths[id(group[0])] < ATTEMPTS:
                        waiting.extendleft([client_task] for client_task in reversed(group))
                        continue
                    reason = f"its worker process died {ATTEMPTS} times ({worker.ending})"
                    yield group[0], Failed(reason, FedloomError(f"client {group[0].client}: {reason}"))
        finally:
            self._dismiss_busy()

    def _groups(self, algorithm: Algorithm, client_tasks: Sequence[ClientTask]) -> list[list[ClientTask]]:
        """What the workers are given, in this order."""
        sizes = self.task.sizes(torch.tensor([client_task.client for client_task in client_tasks], dtype=torch.int64))
        return grouped(client_tasks, sizes, self.workers, 1 if apart(algorithm) else self.chunk)

    def _shared_inbox(self, client_tasks: Sequence[ClientTask]) -> dict[int, Tensor]:
        """What several clients are sent, once in shared memory; by the identity of the tensor."""
        counts = Counter(id(rows) for client_task in client_tasks for rows in client_task.inbox.values())
        tensors = {
            id(rows): rows
            for client_task in client_tasks
            for rows in client_task.inbox.values()
            if counts[id(rows)] > 1
        }
        apart = {key: rows for key, rows in tensors.items() if self.pool.find(rows) is None}
        return dict(zip(apart, self.pool.place(list(apart.values())), strict=True)) if apart else {}

    def _listen(self, worker: _Worker) -> Answers | None:
        """What a worker says: its answers, or None when it is ready for the first time or dead."""
        try:
            answers = worker.receive()
        except (EOFError, OSError):
            self._crew.remove(worker)
            worker.end(patience=1.0)
            if not worker.ready:
                self._failed_starts += 1
                if self._failed_starts >= ATTEMPTS:
                    self._failed_starts = 0
                    raise FedloomError(f"worker processes cannot start ({worker.ending})") from None
            return None
        self._failed_starts = 0
        if isinstance(answers, Broken):
            raise answers.error
        return answers

    def _pack(self, message: object) -> Parcel:
        """Raises `InvalidValue` for what cannot travel to another process."""
        try:
            return pack(message, self.pool)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise InvalidValue(
                f"engine 'processes' cannot send this to its workers ({text}): define classes and functions "
                "at the top level of a module, or use engine 'rows'"
            ) from error

    # --- the workers ---

    def _hire(self) -> None:
        while len(self._crew) < self.workers:
            self._crew.append(_Worker.start(self.threads, self.pool, self._setup))

    def _speaking(self) -> list[_Worker]:
        listened = {worker.channel.connection: worker for worker in self._crew if worker.group or not worker.ready}
        return [listened[line] for line in wait(list(listened)) if isinstance(line, Connection)]

    def _dismiss_busy(self) -> None:
        for worker in [worker for worker in self._crew if worker.group]:
            self._crew.remove(worker)
            worker.end()

    # --- what clients remember ---

    def close(self) -> None:
        _dismiss(self._crew)
        self.store.close()


@dataclass(eq=False)
class _Worker:
    """A worker process as its parent sees it, and the clients it is busy with."""

    process: subprocess.Popen[bytes]
    channel: Channel
    setup: Parcel | None
    briefing: Parcel | None = None
    told: Parcel | None = None
    group: Sequence[ClientTask] = ()
    parcel: Parcel | None = None  # what it was sent for these clients
    ready: bool = False

    @classmethod
    def start(cls, threads: int, pool: Pool, setup: Parcel) -> _Worker:
        """Start a process; it says so when it is ready. The caller's program is not run again in it."""
        ours, theirs = Pipe()
        descriptor = theirs.fileno()
        paths = [path or os.getcwd() for path in sys.path]
        surroundings = {
            **os.environ,
            VARIABLE: "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(descriptor), str(threads)],
            stdin=subprocess.DEVNULL,
            env=surroundings,
            pass_fds=[descriptor],
            process_group=0,  # Ctrl-C in a terminal is for this process alone
        )
        theirs.close()
        return cls(process, Channel(ours, pool), setup)

    def begin(self, briefing: Parcel, told: Parcel, group: Sequence[ClientTask], parcel: Parcel) -> None:
        """Let it work, after whatever it must know first and does not know yet. Raises `OSError` when it is dead."""
        self.group, self.parcel = group, parcel
        if self.setup is not None:
            self.channel.send(self.setup)
            self.setup = None
        if self.briefing is not briefing:
            self.channel.send(briefing)
            self.briefing, self.told = briefing, None
        if self.told is not told:
            self.channel.send(told)
            self.told = told
        self.channel.send(parcel)

    def receive(self) -> Answers | Broken | None:
        """What it says next; tensors are ours."""
        said: Answers | Broken | None = self.channel.receive()
        self.ready = True
        self.group, self.parcel = (), None
        if said is None or isinstance(said, Broken):
            return said
        return tuple(_owned(answer) if isinstance(answer, Done) else answer for answer in said)

    def end(self, patience: float = 0.0) -> None:
        """End the process, which holds nothing that anybody would miss; one that is ending by itself gets `patience` seconds."""
        self.group, self.parcel = (), None
        self.channel.connection.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def ending(self) -> str:
        """How the process ended."""
        code = self.process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _owned(answer: Done) -> Done:
    tensors = {name: tensor.clone() for name, tensor in answer.tensors.items()}
    written = {name: tensor.clone() for name, tensor in answer.written.items()}
    return Done(tensors, answer.placed, answer.metrics, written)


def _dismiss(crew: list[_Worker]) -> None:
    while crew:
        crew.pop().end()
