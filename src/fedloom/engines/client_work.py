"""What workers are told and answer, and how they train: the same in a process of this machine and in a Ray actor.

A worker remembers nothing between two pieces of work, so that its answer depends on what it was sent alone.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import cloudpickle
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.engines.base import ClientTask, Fault, Reply
from fedloom.engines.pickling import load
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import FedloomError
from fedloom.local.proof import Proof
from fedloom.round import Round
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

Packed = tuple[bytes, list[Tensor]]
"""A message as `dump` leaves it."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """What a worker is told first: the task, how its clients train, and how torch computes there."""

    task: Task
    inside: str = "rows"
    chunk: int | None = None
    proof: Proof | None = None  # which shortcuts the task allows, where workers have what that was found on
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    precision: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)

    def make_engine(self, device: torch.device | None) -> RowsEngine:
        """The engine that trains this worker's clients, on a device of the worker's own if it has one."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.use_deterministic_algorithms(self.deterministic)
        task = self.task
        if device is not None and device.type == "cuda":
            if not torch.cuda.is_available():
                raise FedloomError("Ray gave an actor a GPU, but PyTorch finds none there")
            task = task.to(device)
        if self.inside == "rows":
            return RowsEngine(task, self.proof, memory_budget=sys.maxsize)
        return StackedEngine(task, self.proof, memory_budget=sys.maxsize, chunk=self.chunk)


@dataclass(frozen=True)
class Assignment:
    """What all work of a round needs: the method, what a reply must hold, and the tensors that several clients are sent."""

    algorithm: Algorithm
    round: Round
    expected: Mapping[str, tuple[int, ...]]
    common: tuple[Tensor, ...]


@dataclass(frozen=True)
class ClientWork:
    """One client: what it was sent, what it remembers, and where its reply is to be written (elsewhere it is sent back)."""

    client: int
    slot: int | None
    inbox: Tensors
    memory: Tensors
    places: Tensors


@dataclass(frozen=True)
class Work:
    """What a worker does in one go: the clients that train, or whose models are scored."""

    kind: Literal["train", "evaluate"]
    clients: tuple[ClientWork, ...]


@dataclass(frozen=True)
class ClientResult:
    """A client has trained: the tensors that had no place, the names of those that had one, and what it wrote to its memory."""

    tensors: Tensors
    placed: tuple[str, ...]
    metrics: Mapping[str, float]
    written: Tensors


@dataclass(frozen=True)
class Answers:
    """One result for each client that trained, in their order, or what scoring gave, in any; and what there is to say of how
    clients train."""

    results: tuple[ClientResult | Fault | Tally, ...]
    notices: tuple[str, ...]


class ClientTrainer:
    """What runs in a worker. Whatever goes wrong is the answer to the next piece of work.

    With a `device`, the task and what clients are sent are copied there. Without, both are used where they lie.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._engine: RowsEngine | None = None
        self._assignment: Assignment | None = None
        self._packed_setup: Packed | None = None
        self._packed_assignment: Packed | None = None

    def begin(self, setup: Packed) -> None:
        """Take up a task."""
        self._packed_setup, self._engine = setup, None

    def assign(self, assignment: Packed) -> None:
        """Take up a method and a round; the ones before may go."""
        self._packed_assignment, self._assignment = assignment, None

    def work(self, work: Packed) -> Answers | Exception:
        """The answers to a piece of work, or what keeps this worker from any."""
        try:
            if self._engine is None:
                assert self._packed_setup is not None
                setup: Setup = load(*self._packed_setup)
                self._engine, self._packed_setup = setup.make_engine(self.device), None
            if self._assignment is None:
                assert self._packed_assignment is not None
                self._assignment = load(*self._packed_assignment, task=self._engine.task)
                self._packed_assignment = None
            return self._answers(self._engine, self._assignment, load(*work, known=self._assignment.common))
        except FedloomError as error:
            return _portable(error)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return FedloomError(f"a worker cannot take part: {text}")

    def _answers(self, engine: RowsEngine, assignment: Assignment, work: Work) -> Answers | Exception:
        algorithm, round = assignment.algorithm, assignment.round
        engine.store.begin(None)
        for client in work.clients:
            if client.memory:
                engine.store.write(client.client, client.memory)
        engine.store.commit()
        client_tasks = [ClientTask(client.client, client.slot, self._inbox(client)) for client in work.clients]
        if work.kind == "evaluate":
            try:
                return Answers(tuple(engine.evaluate(algorithm, round, client_tasks)), tuple(engine.notices))
            except Exception as error:
                return _portable(error)
        found = engine.train_expecting(algorithm, round, client_tasks, assignment.expected)
        results = {id(result.client_task): result for result in found}
        pairs = zip(work.clients, client_tasks, strict=True)
        answers = tuple(_answer(engine, client, results[id(client_task)]) for client, client_task in pairs)
        return Answers(answers, tuple(engine.notices))

    def _inbox(self, client: ClientWork) -> Tensors:
        if self.device is None:
            return client.inbox
        return {name: tensor.to(self.device, copy=True) for name, tensor in client.inbox.items()}


def _answer(engine: RowsEngine, client: ClientWork, result: Reply | Fault) -> ClientResult | Fault:
    """What one client's training gave, with its reply written where that belongs."""
    if isinstance(result, Fault):
        error = None if result.error is None else _portable(result.error)
        return replace(result, client_task=ClientTask(client.client, client.slot, {}), error=error)
    rest, placed = {}, []
    for name, tensor in result.tensors.items() if client.slot is not None else ():
        place = client.places.get(name)
        if place is not None and place.dtype == tensor.dtype:
            place.copy_(tensor)
            placed.append(name)
        else:
            rest[name] = tensor
    remembered = engine.store.read(client.client)
    written = {name: tensor for name, tensor in remembered.items() if tensor is not client.memory.get(name)}
    return ClientResult(rest, tuple(placed), result.metrics, written)


def _portable(error: Exception) -> Exception:
    """The error if it survives the way to the engine, else one of the same text."""
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return FedloomError(str(error)) if isinstance(error, FedloomError) else RuntimeError(str(error))
    return error


def slim(task: Task) -> Task:
    """What workers need of the task: not the test set nor labels that clients do not see, and the training samples once."""
    nothing = task.test[:0]
    dataset = replace(task.dataset, train=task.train[:0], test=nothing)
    return replace(task, dataset=dataset, test=nothing, true_labels=None)
