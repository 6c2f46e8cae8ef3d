"""Messages between an engine and its workers, and the worker's side.

They are the same for local processes and Ray actors. A worker has no state between two messages, so
its answer depends only on its messages.
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

from fedloom.algorithm.records import Exchange, Specs
from fedloom.common.errors import FedloomError, error_text, mark_location
from fedloom.common.round import Round
from fedloom.engines.pickling import Packed, load
from fedloom.engines.proof import Proof
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.client_errors import clients_of, mark_clients
from fedloom.rounds.engine import Answer, Fault, FoldedBlock, Job
from fedloom.rounds.replies import RoundReplies, weights_of
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """The first message to a worker.

    Attributes:
        task: Data, model and local training.
        inside: Engine in the worker, `rows` or `stacked`.
        chunk: Number of clients that train in lock step. None: chosen in the worker.
        proof: Shortcuts that the task allows. None if the worker has another device.
        dtype: PyTorch's default type.
        precision: PyTorch's precision of float32 matrix products.
        deterministic: True if PyTorch uses deterministic algorithms.
    """

    task: Task
    inside: str = "rows"
    chunk: int | None = 1
    proof: Proof | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    precision: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)

    def make_engine(self, device: torch.device | None) -> RowsEngine:
        """Apply the settings, and create the engine of this worker on `device`.

        Raises:
            FedloomError: PyTorch finds no GPU for `device`.
        """
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        # Set it only if needed: setting it imports PyTorch's compiler.
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic)
        task = self.task
        if device is not None and device.type == "cuda":
            if not torch.cuda.is_available():
                raise FedloomError(
                    "Ray assigned a GPU to an actor, but PyTorch finds no GPU on its node: install "
                    "a PyTorch build with CUDA there"
                )
            task = task.to(device)
        if self.inside == "rows":
            return RowsEngine(task, self.proof, memory_budget=sys.maxsize)
        return StackedEngine(task, self.proof, memory_budget=sys.maxsize, chunk=self.chunk)


@dataclass(frozen=True)
class Assignment:
    """Data of a round for all its clients.

    Attributes:
        pipeline: Pipeline of the round.
        round: The round.
        expected: Names, shapes and types of replies.
        common: Tensors that several clients receive.
        exchange: Record of the round, if workers fold blocks of replies.
        state: State of the server before the round, for folding.
        slots: Number of slots of the round, for folding.
        size: Number of slots in a block, for folding.
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
    """The work of one client.

    Attributes:
        job: Its job.
        memory: Its memory.
        targets: Tensors in shared memory for its reply. All other tensors are sent in the answer.
    """

    job: Job
    memory: Tensors
    targets: Tensors


@dataclass(frozen=True)
class Work:
    """Clients that train or are evaluated. With `fold` they are a whole block to be folded."""

    kind: Literal["train", "evaluate"]
    clients: tuple[ClientWork, ...]
    fold: bool = False


@dataclass(frozen=True)
class ClientResult:
    """The result of one client.

    Attributes:
        tensors: Tensors of the reply that are not in shared memory.
        metrics: Figures of the training by name.
        written: Tensors that the client has written to its memory.
    """

    tensors: Tensors
    metrics: Mapping[str, float]
    written: Tensors


@dataclass(frozen=True)
class WorkDone:
    """The answer to a `Work`.

    Attributes:
        results: Results of the clients. Results of training are in the order of the jobs.
        notices: New warnings for the user.
        folded: Aggregate of the block, if it was folded.
    """

    results: tuple[ClientResult | Fault | Tally, ...]
    notices: tuple[str, ...]
    folded: FoldedBlock | None = None


class ClientTrainer:
    """Trains clients in a worker."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._engine: RowsEngine
        self._assignment: Assignment

    def take(
        self, setup: Packed | None, assignment: Packed | None, work: Packed
    ) -> WorkDone | Exception:
        """Handle the messages of `WorkerHandle.submit`.

        Args:
            setup: Packed `Setup`, if it is new.
            assignment: Packed `Assignment`, if it is new.
            work: Packed `Work`.

        Returns:
            The answer, or the exception that the parent raises.
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
            return _picklable(error)
        except Exception as error:
            return FedloomError(f"a worker failed: {error_text(error)}")

    def _answers(
        self, engine: RowsEngine, assignment: Assignment, work: Work
    ) -> WorkDone | Exception:
        pipeline = assignment.pipeline
        round = assignment.round
        engine.reset_notices()
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
                return _picklable(error)
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
    """Fold the replies of a block in the same way as the server."""
    assignment.pipeline.restore(assignment.state)
    weigh = partial(weights_of, task)
    fold = partial(assignment.pipeline.fold, assignment.round)
    size = assignment.size
    replies = RoundReplies(jobs, assignment.slots, size, weigh, fold, exchange=assignment.exchange)
    replies.collect(trained)
    number = min(job.slot for job in jobs if job.slot is not None) // size
    return FoldedBlock(number, replies.aggregate, replies.integers, replies.bytes)


def _answer(engine: RowsEngine, client: ClientWork, result: Answer | Fault) -> ClientResult | Fault:
    """Return one client's result. Write the tensors with a target into shared memory."""
    if isinstance(result, Fault):
        error = None if result.error is None else _picklable(result.error)
        return replace(result, job=replace(result.job, inbox={}), error=error)
    tensors = {} if result.job.slot is None else dict(result.tensors)
    for name in client.targets.keys() & tensors.keys():
        client.targets[name].copy_(tensors.pop(name))
    memory = engine.store.read(result.job.client)
    written = {
        name: tensor for name, tensor in memory.items() if tensor is not client.memory.get(name)
    }
    return ClientResult(tensors, result.metrics, written)


def _picklable(error: Exception) -> Exception:
    """Return the error with its code location. Replace it by its text if it cannot be pickled."""
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
        mark_clients(plain, clients_of(error))
        return plain.with_traceback(None)
    return error


def slim(task: Task) -> Task:
    """Return the task without test set, hidden labels and the second reference to the samples.

    Workers do not need them.
    """
    empty = task.test[:0]
    dataset = replace(task.dataset, train=task.train[:0], test=empty, encoding=None)
    return replace(task, dataset=dataset, test=empty, true_labels=None)
