"""The messages between an engine and its workers, and the worker's side: the same in a local process and in a Ray actor.

A worker keeps nothing between two pieces of work, so its answer depends only on what it was sent.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import cloudpickle
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.engines.pickling import load
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import FedloomError, error_text, mark_place
from fedloom.local.proof import Proof
from fedloom.round import Round
from fedloom.rounds.engine import ClientTask, Fault, FoldedBlock, Reply
from fedloom.rounds.replies import RoundReplies, weights_of
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

Packed = tuple[bytes, list[Tensor]]
"""A message as `dump` leaves it."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """The first message: the task, how clients train in the worker, and the settings of PyTorch."""

    task: Task
    inside: str = "rows"
    chunk: int | None = None
    proof: Proof | None = None  # which shortcuts the task allows, where workers have what that was found on
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    precision: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)

    def make_engine(self, device: torch.device | None) -> RowsEngine:
        """Apply the settings and make the engine that trains clients in this worker, on `device` where one is given."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:  # to set it imports PyTorch's compiler
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
    """What holds for a whole round: the method, the names and shapes expected in a reply, and tensors sent to several clients."""

    algorithm: Algorithm
    round: Round
    expected: Mapping[str, tuple[int, ...]]
    common: tuple[Tensor, ...]
    folding: Folding | None = None


@dataclass(frozen=True)
class Folding:
    """What workers need to fold the replies of a whole block: the method's server state before the round, how many slots the
    round has, and how many of them are a block."""

    state: Tensors
    slots: int
    size: int


@dataclass(frozen=True)
class ClientWork:
    """One client: its task, its memory, and the shared tensors to write its reply into (others are sent back)."""

    client_task: ClientTask
    memory: Tensors
    places: Tensors


@dataclass(frozen=True)
class Work:
    """One piece of work: clients that train, or whose models are evaluated; `fold` says that they are a whole block, whose
    replies are to be folded."""

    kind: Literal["train", "evaluate"]
    clients: tuple[ClientWork, ...]
    fold: bool = False


@dataclass(frozen=True)
class ClientResult:
    """A trained client: tensors that are sent back, names of those written to their places, and what it stored in its memory."""

    tensors: Tensors
    placed: tuple[str, ...]
    metrics: Mapping[str, float]
    written: Tensors


@dataclass(frozen=True)
class Answers:
    """One result for each client that trained, in order, or the tallies of an evaluation, in any order; the notices that came up
    meanwhile; and the aggregate of a whole block, whose results then have no tensors."""

    results: tuple[ClientResult | Fault | Tally, ...]
    notices: tuple[str, ...]
    folded: FoldedBlock | None = None


class ClientTrainer:
    """The worker's side. An error in `begin` or `assign` is returned by the next `work`, since only that has an answer.

    With a `device`, the task and the clients' inboxes are copied to it. Without, both are used where they are.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._engine: RowsEngine | None = None
        self._assignment: Assignment | None = None
        self._packed_setup: Packed | None = None
        self._packed_assignment: Packed | None = None

    def begin(self, setup: Packed) -> None:
        """Keep a packed `Setup`."""
        self._packed_setup, self._engine = setup, None

    def assign(self, assignment: Packed) -> None:
        """Keep a packed `Assignment`, and free the one before."""
        self._packed_assignment, self._assignment = assignment, None

    def work(self, work: Packed) -> Answers | Exception:
        """Do a packed piece of `Work`: its answers, or the exception that prevented them."""
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
            return FedloomError(f"a worker cannot take part: {error_text(error)}")

    def _answers(self, engine: RowsEngine, assignment: Assignment, work: Work) -> Answers | Exception:
        algorithm, round = assignment.algorithm, assignment.round
        engine.renew_notices()
        engine.store.begin(None)
        for client in work.clients:
            if client.memory:
                engine.store.write(client.client_task.client, client.memory)
        engine.store.commit()
        client_tasks = [self._here(client.client_task) for client in work.clients]
        if work.kind == "evaluate":
            try:
                return Answers(tuple(engine.evaluate(algorithm, round, client_tasks)), tuple(engine.notices))
            except Exception as error:
                return _portable(error)
        found = engine.train_expecting(algorithm, round, client_tasks, assignment.expected)
        folded = None
        if work.fold and assignment.folding is not None:
            folded, found = _folded(engine.task, algorithm, round, client_tasks, assignment.folding, found)
        results = {id(result.client_task): result for result in found}
        pairs = zip(work.clients, client_tasks, strict=True)
        answers = tuple(_answer(engine, client, results[id(client_task)]) for client, client_task in pairs)
        return Answers(answers, tuple(engine.notices), folded)

    def _here(self, client_task: ClientTask) -> ClientTask:
        if self.device is None:
            return client_task
        inbox = {name: tensor.to(self.device, copy=True) for name, tensor in client_task.inbox.items()}
        return replace(client_task, inbox=inbox)


def _folded(
    task: Task,
    algorithm: Algorithm,
    round: Round,
    client_tasks: Sequence[ClientTask],
    folding: Folding,
    found: Iterable[Reply | Fault],
) -> tuple[FoldedBlock, Iterator[Reply | Fault]]:
    """The block of all these clients as the server would fold it, and their results without tensors."""
    algorithm.restore(folding.state)
    results: list[Reply | Fault] = []

    def passing() -> Iterator[Reply | Fault]:
        for result in found:
            results.append(result if isinstance(result, Fault) else replace(result, tensors={}))
            yield result

    replies = RoundReplies(
        client_tasks, folding.slots, folding.size, partial(weights_of, task), partial(algorithm.fold, round)
    )
    replies.collect(passing())
    number = min(one.slot for one in client_tasks if one.slot is not None) // folding.size
    return FoldedBlock(number, replies.aggregate, replies.integers, replies.bytes), iter(results)


def _answer(engine: RowsEngine, client: ClientWork, result: Reply | Fault) -> ClientResult | Fault:
    """One client's result; its reply is written into its places."""
    if isinstance(result, Fault):
        error = None if result.error is None else _portable(result.error)
        return replace(result, client_task=replace(result.client_task, inbox={}), error=error)
    rest, placed = {}, []
    for name, tensor in result.tensors.items() if result.client_task.slot is not None else ():
        place = client.places.get(name)
        if place is not None and place.dtype == tensor.dtype:
            place.copy_(tensor)
            placed.append(name)
        else:
            rest[name] = tensor
    remembered = engine.store.read(result.client_task.client)
    written = {name: tensor for name, tensor in remembered.items() if tensor is not client.memory.get(name)}
    return ClientResult(rest, tuple(placed), result.metrics, written)


def _portable(error: Exception) -> Exception:
    """The error with its place, or one with the same text where it cannot be pickled."""
    mark_place(error)
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        told = FedloomError(str(error)) if isinstance(error, FedloomError) else RuntimeError(str(error))
        mark_place(told.with_traceback(error.__traceback__))
        return told.with_traceback(None)
    return error


def slim(task: Task) -> Task:
    """The task without what workers do not need: the test set, labels hidden from clients, a second copy of the samples."""
    nothing = task.test[:0]
    dataset = replace(task.dataset, train=task.train[:0], test=nothing)
    return replace(task, dataset=dataset, test=nothing, true_labels=None)
