"""A worker process: it trains clients one at a time, or several in lock step, and remembers nothing between two pieces of work.

It is started with `main`, finds the pipe to its parent open under a descriptor, and ends when the other end of the pipe is
gone.
"""

from __future__ import annotations

import os
import pickle
import runpy
import select
import signal
import sys
import threading
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Plan
from fedloom.engines.base import ClientTask, Fault, Reply
from fedloom.engines.processes.channel import Channel, Parcel, Unpickler, pack
from fedloom.engines.processes.shared import Pool
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import FedloomError
from fedloom.flat.allocator import keep_pages
from fedloom.round import Round
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

VARIABLE = "FEDLOOM_WORKER"
"""Set in the environment of worker processes."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """What is settled before anything else: where the parent's main program lies, and how torch computes there."""

    main_path: str | None
    main_module: str | None
    dtype: torch.dtype
    precision: str
    deterministic: bool

    @classmethod
    def of_this_process(cls) -> Setup:
        main = sys.modules["__main__"]
        specification = getattr(main, "__spec__", None)
        path = getattr(main, "__file__", None)
        return cls(
            None if path is None else os.path.abspath(path),
            None if specification is None else specification.name,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def apply(self) -> None:
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.use_deterministic_algorithms(self.deterministic)


@dataclass(frozen=True)
class Assignment:
    """The method and the round that the next clients work for."""

    algorithm: Algorithm
    round: Round
    expected: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Briefing:
    """What workers need of the task, and how many clients may advance together."""

    task: Task
    chunk: int


@dataclass(frozen=True)
class Share:
    """One client: what it was sent, what it remembers, and where its reply goes."""

    client: int
    slot: int | None
    inbox: Tensors
    memory: Tensors
    places: Tensors

    @property
    def client_task(self) -> ClientTask:
        return ClientTask(self.client, self.slot, self.inbox)


@dataclass(frozen=True)
class Work:
    """What a worker does in one go: the clients that train, or whose models are judged."""

    kind: Literal["train", "evaluate"]
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Done:
    """A client has trained: the tensors that had no place, the names of those that had one, and what it wrote to its memory."""

    tensors: Tensors
    placed: tuple[str, ...]
    metrics: Mapping[str, float]
    written: Tensors


@dataclass(frozen=True)
class Failed:
    """A client failed or its reply was refused."""

    reason: str
    error: Exception | None


Answers = tuple[Done | Failed | Tally, ...]
"""One for each client: in their order where they trained, in any where their models were judged."""


@dataclass(frozen=True)
class Broken:
    """Something is wrong that is not the client's."""

    error: FedloomError


class Worker:
    """What runs in the process."""

    def __init__(self, connection: Connection) -> None:
        self.pool = Pool()
        self.channel = Channel(connection, self.pool, self._unpickler)
        self.setup: Setup | None = None
        self.knows_main = False
        self.engine: RowsEngine | None = None
        self.assignment: Assignment | None = None

    def serve(self) -> None:
        """Answer until nobody asks any more."""
        answer: Parcel | None = pack(None, self.pool)  # imports are done
        while True:
            try:
                if answer is not None:
                    self.channel.send(answer)
                message = self.channel.receive()
            except (EOFError, OSError):
                return
            except Exception as error:
                answer = self._broken(error)
                continue
            try:
                answer = None
                if isinstance(message, Work):
                    answer = pack(self._work(message), self.pool)
                else:
                    self._take(message)
            except Exception as error:
                answer = self._broken(error)

    def _broken(self, error: Exception) -> Parcel:
        if not isinstance(error, FedloomError):
            text = " ".join(f"{type(error).__name__}: {error}".split())
            error = FedloomError(f"a worker process cannot take part: {text}")
        return pack(Broken(_portable(error)), self.pool)

    def _take(self, message: Setup | Briefing | Assignment) -> None:
        if isinstance(message, Setup):
            self.setup = message
            message.apply()
        elif isinstance(message, Briefing):
            kind = RowsEngine if message.chunk == 1 else partial(StackedEngine, chunk=message.chunk)
            self.engine = kind(message.task, memory_budget=sys.maxsize)
        else:
            self.assignment = message

    def _work(self, work: Work) -> Answers:
        assert self.engine is not None
        assert self.assignment is not None
        engine, algorithm, round = self.engine, self.assignment.algorithm, self.assignment.round
        engine.store.begin(None)
        for share in work.shares:
            if share.memory:
                engine.store.write(share.client, share.memory)
        engine.store.commit()
        client_tasks = [share.client_task for share in work.shares]
        if work.kind == "evaluate":
            try:
                return tuple(engine.evaluate(algorithm, round, client_tasks))
            except Exception as error:
                return tuple(Failed(str(error), _portable(error)) for _ in client_tasks)
        found = engine.train_expecting(algorithm, round, client_tasks, self.assignment.expected)
        results = {id(result.client_task): result for result in found}
        return tuple(
            self._answer(share, results[id(client_task)])
            for share, client_task in zip(work.shares, client_tasks, strict=True)
        )

    def _answer(self, share: Share, result: Reply | Fault) -> Done | Failed:
        """What one client's training gave, with its reply written where that belongs."""
        assert self.engine is not None
        if isinstance(result, Fault):
            return Failed(result.reason, None if result.error is None else _portable(result.error))
        rest, placed = {}, []
        for name, tensor in result.tensors.items() if share.slot is not None else ():
            place = share.places.get(name)
            if place is not None and place.dtype == tensor.dtype:
                place.copy_(tensor)
                placed.append(name)
            else:
                rest[name] = tensor
        remembered = self.engine.store.read(share.client)
        written = {name: tensor for name, tensor in remembered.items() if tensor is not share.memory.get(name)}
        return Done(rest, tuple(placed), result.metrics, written)

    def _unpickler(self, data: bytes, tensors: list[Tensor]) -> pickle.Unpickler:
        return _WorkerUnpickler(data, tensors, self)


class _WorkerUnpickler(Unpickler):
    """Knows the task, and finds what the parent's main program defines."""

    def __init__(self, data: bytes, tensors: list[Tensor], worker: Worker) -> None:
        super().__init__(data, tensors)
        self._worker = worker

    def resolve(self, kind: str, values: list[Any]) -> Any:
        if kind != "plan" or self._worker.engine is None:
            return super().resolve(kind, values)
        task = self._worker.engine.task
        clients, participants, rounds, seed, classes = values
        return Plan(
            task.layout, task.initial, clients, participants, rounds, seed, classes, task.sizes, task.model
        )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._worker.setup is not None and not self._worker.knows_main:
            _import_main(self._worker.setup, name)
            self._worker.knows_main = True
        return super().find_class(module, name)


def _import_main(setup: Setup, wanted: str) -> None:
    """Make `__main__` here what it is in the parent, without running what stands below `if __name__ == "__main__"`.

    Raises `FedloomError` when there is no file to import or when it fails.
    """
    by_name = setup.main_module is not None and not setup.main_module.endswith("__main__")
    if not by_name and (setup.main_path is None or not os.path.isfile(setup.main_path)):
        raise FedloomError(
            f"worker processes cannot import {wanted!r} from an interactive session: define it in a file of its own"
        )
    try:
        if by_name:
            content = runpy.run_module(str(setup.main_module), run_name="__mp_main__", alter_sys=True)
        else:
            content = runpy.run_path(str(setup.main_path), run_name="__mp_main__")
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise FedloomError(f"worker processes cannot import {wanted!r} from {setup.main_path}: {text}") from error
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _portable(error: Exception) -> Any:
    """The error if it survives the way to the parent, else one of the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return FedloomError(str(error)) if isinstance(error, FedloomError) else RuntimeError(str(error))
    return error


def slim(task: Task) -> Task:
    """What workers need of the task: not the test set nor labels that clients do not see, and the training samples once."""
    nothing = task.test[:0]
    dataset = replace(task.dataset, train=task.train[:0], test=nothing)
    return replace(task, dataset=dataset, test=nothing, true_labels=None)


def _die_with_the_parent(descriptor: int) -> None:
    """Wait until the other end of the pipe is closed, by whatever ended the parent, and end at once."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported, and nothing else here
    poll.poll()
    os._exit(0)


def main() -> None:
    """Serve on the pipe that the parent opened; arguments are its descriptor and the number of threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which decides
    descriptor, threads = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_die_with_the_parent, args=(descriptor,), daemon=True).start()
    torch.set_num_threads(threads)
    keep_pages()
    Worker(Connection(descriptor)).serve()
