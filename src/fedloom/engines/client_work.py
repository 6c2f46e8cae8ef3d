"""The messages between an engine and its workers, and the worker's side: the same in a local
process and in a Ray actor.

A worker keeps nothing between two pieces of work, so its answer depends only on what it was sent.
"""

import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import cloudpickle
import torch
from torch import Tensor

from fedloom.engines.pickling import Packed, load
from fedloom.engines.proof import Proof
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import FedloomError, error_text, mark_location
from fedloom.parts.pipeline import Pipeline
from fedloom.records import Exchange, Specs
from fedloom.round import Round
from fedloom.rounds.engine import Answer, Fault, FoldedBlock, Job
from fedloom.rounds.replies import RoundReplies, weights_of
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """The first message: the task, how clients train in the worker, and the settings of PyTorch."""

    task: Task
    inside: str = "rows"
    chunk: int | None = 1
    # shortcuts that the task allows, if workers run on the device that it was proven on
    proof: Proof | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    precision: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)

    def make_engine(self, device: torch.device | None) -> RowsEngine:
        """Apply the settings and make the engine that trains clients in this worker, on `device` if
        there is one.
        """
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        # to set it imports PyTorch's compiler
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
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
    """Data of a round: the method, the names, shapes and types expected in a reply, and tensors
    sent to several clients.

    With an `exchange`, the round's, also what folding blocks of `size` slots takes: the server's
    state before, and the slots.
    """

    pipeline: Pipeline
    round: Round
    expected: Specs
    common: tuple[Tensor, ...]
    exchange: Exchange | None = None
    state: Tensors = field(default_factory=dict)
    slots: int = 0
    size: int = 1


@dataclass(frozen=True)
class ClientWork:
    """One client: its task, its memory, and the shared tensors that its reply is written into (all
    others are sent back).
    """

    job: Job
    memory: Tensors
    targets: Tensors


@dataclass(frozen=True)
class Work:
    """Clients that train or are evaluated; with `fold` they are a full block, whose replies are
    folded.
    """

    kind: Literal["train", "evaluate"]
    clients: tuple[ClientWork, ...]
    fold: bool = False


@dataclass(frozen=True)
class ClientResult:
    """A trained client: the tensors that are not in shared memory, metrics, writes to its memory."""

    tensors: Tensors
    metrics: Mapping[str, float]
    written: Tensors


@dataclass(frozen=True)
class WorkDone:
    """Results of a piece of work, of training in order; new notices; and the aggregate of a folded
    block.
    """

    results: tuple[ClientResult | Fault | Tally, ...]
    notices: tuple[str, ...]
    folded: FoldedBlock | None = None


class ClientTrainer:
    """The worker's side."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._engine: RowsEngine
        self._assignment: Assignment

    def take(
        self, setup: Packed | None, assignment: Packed | None, work: Packed
    ) -> WorkDone | Exception:
        """Do a piece of work, with a new `Setup` and `Assignment` if they are given; return the
        answers, or the exception.
        """
        try:
            if setup is not None:
                self._engine = load(*setup).make_engine(self.device)
            if assignment is not None:
                self._assignment = load(*assignment, task=self._engine.task)
            return self._answers(
                self._engine, self._assignment, load(*work, common=self._assignment.common)
            )
        except FedloomError as error:
            return _portable(error)
        except Exception as error:
            return FedloomError(f"a worker cannot take part: {error_text(error)}")

    def _answers(
        self, engine: RowsEngine, assignment: Assignment, work: Work
    ) -> WorkDone | Exception:
        pipeline, round = assignment.pipeline, assignment.round
        engine.renew_notices()
        engine.store.begin(None)
        for client in work.clients:
            if client.memory:
                engine.store.write(client.job.client, client.memory)
        engine.store.commit()
        jobs = [self._on_device(client.job) for client in work.clients]
        if work.kind == "evaluate":
            try:
                return WorkDone(
                    tuple(engine.evaluate(pipeline, round, jobs)), tuple(engine.notices)
                )
            except Exception as error:
                return _portable(error)
        trained = list(engine.train_block(pipeline, round, jobs, assignment.expected))
        folded = None
        if work.fold:
            folded = _folded(engine.task, assignment, jobs, trained)
            trained = [
                result if isinstance(result, Fault) else replace(result, tensors={})
                for result in trained
            ]
        results = {id(result.job): result for result in trained}
        pairs = zip(work.clients, jobs, strict=True)
        answers = tuple(_answer(engine, client, results[id(job)]) for client, job in pairs)
        return WorkDone(answers, tuple(engine.notices), folded)

    def _on_device(self, job: Job) -> Job:
        if self.device is None:
            return job
        inbox = {name: tensor.to(self.device, copy=True) for name, tensor in job.inbox.items()}
        return replace(job, inbox=inbox)


def _folded(
    task: Task, assignment: Assignment, jobs: Sequence[Job], trained: Sequence[Answer | Fault]
) -> FoldedBlock:
    """Return the replies of a block of slots, folded as the server would."""
    assignment.pipeline.restore(assignment.state)
    weigh, fold = partial(weights_of, task), partial(assignment.pipeline.fold, assignment.round)
    size = assignment.size
    replies = RoundReplies(jobs, assignment.slots, size, weigh, fold, exchange=assignment.exchange)
    replies.collect(trained)
    number = min(task.slot for task in jobs if task.slot is not None) // size
    return FoldedBlock(number, replies.aggregate, replies.integers, replies.bytes)


def _answer(engine: RowsEngine, client: ClientWork, result: Answer | Fault) -> ClientResult | Fault:
    """Return one client's result, with its reply written into shared memory as far as that fits."""
    if isinstance(result, Fault):
        error = None if result.error is None else _portable(result.error)
        return replace(result, job=replace(result.job, inbox={}), error=error)
    tensors = {} if result.job.slot is None else dict(result.tensors)
    for name in client.targets.keys() & tensors.keys():
        client.targets[name].copy_(tensors.pop(name))
    memory = engine.store.read(result.job.client)
    written = {
        name: tensor for name, tensor in memory.items() if tensor is not client.memory.get(name)
    }
    return ClientResult(tensors, result.metrics, written)


def _portable(error: Exception) -> Exception:
    """Return the error with its place in the code, or one of the same text if it cannot be pickled."""
    mark_location(error)
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        plain = (
            FedloomError(str(error))
            if isinstance(error, FedloomError)
            else RuntimeError(str(error))
        )
        mark_location(plain.with_traceback(error.__traceback__))
        return plain.with_traceback(None)
    return error


def slim(task: Task) -> Task:
    """Return the task without data that workers do not need: test set, hidden labels, a second copy
    of the samples.
    """
    empty = task.test[:0]
    dataset = replace(task.dataset, train=task.train[:0], test=empty, encoding=None)
    return replace(task, dataset=dataset, test=empty, true_labels=None)
