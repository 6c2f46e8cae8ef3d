"""The messages between an engine and its workers, and the worker's side: the same in a local process and in a Ray actor.

A worker keeps nothing between two pieces of work, so its answer depends only on what it was sent.
"""

import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import cloudpickle
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Exchange
from fedloom.engines.pickling import load
from fedloom.engines.proof import Proof
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import FedloomError, error_text, mark_location
from fedloom.round import Round
from fedloom.rounds.engine import ClientTask, Fault, FoldedBlock, Reply, TensorSpec
from fedloom.rounds.replies import RoundReplies, weights_of
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

Packed = tuple[bytes, list[Tensor]]
"""A message as `dump` leaves it."""

Tensors = dict[str, Tensor]

MessageKind = Literal["begin", "assign", "work"]


@dataclass(frozen=True)
class Setup:
    """The first message: the task, how clients train in the worker, and the settings of PyTorch."""

    task: Task
    inside: str = "rows"
    chunk: int | None = None
    proof: Proof | None = None  # shortcuts that the task allows, if workers run on the device that it was proven on
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    precision: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)

    def make_engine(self, device: torch.device | None) -> RowsEngine:
        """Apply the settings and make the engine that trains clients in this worker, on `device` if there is one."""
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
    """Data of a round: the method, the names, shapes and types expected in a reply, and tensors sent to several clients."""

    algorithm: Algorithm
    round: Round
    expected: Mapping[str, TensorSpec]
    common: tuple[Tensor, ...]
    folding: "Folding | None" = None


@dataclass(frozen=True)
class Folding:
    """Data to fold a block's replies: server state before the round, the round's exchange, slots of round and of block."""

    state: Tensors
    exchange: Exchange
    slots: int
    size: int


@dataclass(frozen=True)
class ClientWork:
    """One client: its task, its memory, and the shared tensors that its reply is written into (all others are sent back)."""

    client_task: ClientTask
    memory: Tensors
    targets: Tensors


@dataclass(frozen=True)
class Work:
    """Clients that train or are evaluated; with `fold` they are a full block, whose replies are folded."""

    kind: Literal["train", "evaluate"]
    clients: tuple[ClientWork, ...]
    fold: bool = False


@dataclass(frozen=True)
class ClientResult:
    """A trained client: tensors sent back, names of those in shared memory, metrics, writes to its memory."""

    tensors: Tensors
    shared: tuple[str, ...]
    metrics: Mapping[str, float]
    written: Tensors


@dataclass(frozen=True)
class Answers:
    """Results of a piece of work, of training in order; new notices; and the aggregate of a folded block."""

    results: tuple[ClientResult | Fault | Tally, ...]
    notices: tuple[str, ...]
    folded: FoldedBlock | None = None


class ClientTrainer:
    """The worker's side. An error of `begin` or `assign` is the answer to the next `work`, since only that has one."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._engine: RowsEngine | None = None
        self._assignment: Assignment | None = None
        self._packed: dict[MessageKind, Packed] = {}

    def take(self, kind: MessageKind, message: Packed) -> Answers | Exception | None:
        """Keep a packed `Setup` (`begin`) or `Assignment` (`assign`); `work`: return the answers, or the exception instead."""
        self._packed[kind] = message
        if kind != "work":
            self._assignment = None
            self._engine = None if kind == "begin" else self._engine
            return None
        try:
            if self._engine is None:
                setup: Setup = load(*self._packed.pop("begin"))
                self._engine = setup.make_engine(self.device)
            if self._assignment is None:
                self._assignment = load(*self._packed.pop("assign"), task=self._engine.task)
            work = load(*self._packed.pop("work"), common=self._assignment.common)
            return self._answers(self._engine, self._assignment, work)
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
        client_tasks = [self._on_device(client.client_task) for client in work.clients]
        if work.kind == "evaluate":
            try:
                return Answers(tuple(engine.evaluate(algorithm, round, client_tasks)), tuple(engine.notices))
            except Exception as error:
                return _portable(error)
        trained = engine.train(algorithm, round, client_tasks, assignment.expected)
        folded = None
        if work.fold and assignment.folding is not None:
            folded, trained = _folded(engine.task, algorithm, round, client_tasks, assignment.folding, trained)
        results = {id(result.client_task): result for result in trained}
        pairs = zip(work.clients, client_tasks, strict=True)
        answers = tuple(_answer(engine, client, results[id(client_task)]) for client, client_task in pairs)
        return Answers(answers, tuple(engine.notices), folded)

    def _on_device(self, client_task: ClientTask) -> ClientTask:
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
    trained: Iterable[Reply | Fault],
) -> tuple[FoldedBlock, Iterator[Reply | Fault]]:
    """Return the block of all these clients, folded as the server would, and their results without tensors."""
    algorithm.restore(folding.state)
    results: list[Reply | Fault] = []

    def passing() -> Iterator[Reply | Fault]:
        for result in trained:
            results.append(result if isinstance(result, Fault) else replace(result, tensors={}))
            yield result

    replies = RoundReplies(
        client_tasks,
        folding.slots,
        folding.size,
        partial(weights_of, task),
        partial(algorithm.fold, round),
        exchange=folding.exchange,
    )
    replies.collect(passing())
    number = min(task.slot for task in client_tasks if task.slot is not None) // folding.size
    return FoldedBlock(number, replies.aggregate, replies.integers, replies.bytes), iter(results)


def _answer(engine: RowsEngine, client: ClientWork, result: Reply | Fault) -> ClientResult | Fault:
    """Return one client's result, with its reply written into shared memory as far as that fits."""
    if isinstance(result, Fault):
        error = None if result.error is None else _portable(result.error)
        return replace(result, client_task=replace(result.client_task, inbox={}), error=error)
    returned, shared = {}, []
    for name, tensor in result.tensors.items() if result.client_task.slot is not None else ():
        target = client.targets.get(name)
        if target is not None and target.dtype == tensor.dtype:
            target.copy_(tensor)
            shared.append(name)
        else:
            returned[name] = tensor
    memory = engine.store.read(result.client_task.client)
    written = {name: tensor for name, tensor in memory.items() if tensor is not client.memory.get(name)}
    return ClientResult(returned, tuple(shared), result.metrics, written)


def _portable(error: Exception) -> Exception:
    """Return the error with its place in the code, or one of the same text if it cannot be pickled."""
    mark_location(error)
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        plain = FedloomError(str(error)) if isinstance(error, FedloomError) else RuntimeError(str(error))
        mark_location(plain.with_traceback(error.__traceback__))
        return plain.with_traceback(None)
    return error


def slim(task: Task) -> Task:
    """Return the task without data that workers do not need: test set, hidden labels, a second copy of the samples."""
    empty = task.test[:0]
    dataset = replace(task.dataset, train=task.train[:0], test=empty, encoding=None)
    return replace(task, dataset=dataset, test=empty, true_labels=None)
