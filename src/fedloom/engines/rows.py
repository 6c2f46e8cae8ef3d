"""The rows engine: this process trains the clients one after another on one module."""

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from fedloom.algorithm.records import Message, Specs
from fedloom.common.device import keep_pages
from fedloom.common.errors import FedloomError, RefusedReply
from fedloom.common.randomness import global_stream
from fedloom.common.round import Round
from fedloom.engines.base import (
    LocalEngine,
    engines,
    inspect_reply,
    load_integers,
    run_training,
    store_integers,
)
from fedloom.engines.proof import Proof, prove
from fedloom.flat.module import FlatModule
from fedloom.local.cohort import Cohort
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.client_errors import mark_clients, marking_clients
from fedloom.rounds.engine import Answer, Fault, Job, slot_blocks
from fedloom.rounds.scoring import Evaluator, Tally
from fedloom.state.store import BUDGET, Memory
from fedloom.task import Task

T = TypeVar("T")


@engines.register("rows")
class RowsEngine(LocalEngine):
    """Trains clients one after another.

    Each client's model is a row, `[P]`. The parameters of the module are views of this row, so
    training changes the row in place.

    Args:
        task: Data, model and local training.
        proof: Shortcuts that the task allows, if they were proven before.
    """

    in_process: bool | None = True
    stacks: ClassVar[bool] = False
    chunk: int = 1  # number of clients that train in lock step

    def __init__(
        self, task: Task, proof: Proof | None = None, *, memory_budget: int = BUDGET
    ) -> None:
        super().__init__(memory_budget)
        self.task = task
        self.proof = proof or prove(
            task.model, task.dataset, task.train, task.training, stack=self.stacks
        )
        self.notices += self.proof.notices
        self._module_arguments = (
            task.model,
            task.layout,
            self.proof.shortcuts,
            task.training.autocast_dtype,
            task.objective,
        )
        self.flat_module = FlatModule(*self._module_arguments)
        self.evaluator = Evaluator(task.model, task.layout, task.dataset)

    def begin(self, task: Task, directory: Path | None) -> None:
        self.task = task
        self.reset_notices()
        self.flat_module.autocast = task.training.autocast_dtype
        self.store.begin(directory)
        keep_pages()

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> Iterator[Answer | Fault]:
        expected = pipeline.expected(round)
        slots = pipeline.block_size
        size = slots * math.ceil(self.chunk / slots)  # blocks must not divide chunks
        for block in slot_blocks(jobs, round, size).values():
            yield from self.train_block(pipeline, round, block, expected)

    def train_block(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job], expected: Specs
    ) -> Iterator[Answer | Fault]:
        """Train the clients of a block.

        Args:
            pipeline: Pipeline of the round.
            round: The round.
            jobs: Jobs of the clients.
            expected: Shapes and types of replies. A worker has no server state to compute them.

        Returns:
            An iterator of answers and faults, one for each job. A client trains when its result is
            requested.
        """
        train = partial(self.train_chunk, pipeline, round, expected)
        return self._results(pipeline, jobs, train)

    def _results(
        self, pipeline: Pipeline, jobs: Sequence[Job], work: Callable[[Sequence[Job]], list[T]]
    ) -> Iterator[T]:
        """Yield the results of `work` on chunks of clients. Here each chunk has one client."""
        for job in jobs:
            yield from work([job])

    def train_chunk(
        self, pipeline: Pipeline, round: Round, expected: Specs, jobs: Sequence[Job]
    ) -> list[Answer | Fault]:
        """Train a chunk of clients in lock step.

        If a chunk of one client raises an error, the error becomes the client's `Fault`. Mistakes
        in the configuration (`FedloomError`) are raised, because the client is not their cause.

        Args:
            pipeline: Pipeline of the round.
            round: The round.
            expected: Shapes and types of replies.
            jobs: Jobs of the clients.

        Returns:
            Answers in the order of the jobs, or one fault.
        """
        try:
            return self._answers(pipeline, round, expected, jobs)
        except FedloomError as error:
            mark_clients(error, [job.client for job in jobs])
            raise
        except Exception as error:
            if len(jobs) > 1:
                raise
            traceback.clear_frames(error.__traceback__)  # frees the tensors of the failed step
            return [Fault(jobs[0], f"{type(error).__name__}: {error}", error)]

    @torch.enable_grad()
    def _answers(
        self, pipeline: Pipeline, round: Round, expected: Specs, jobs: Sequence[Job]
    ) -> list[Answer | Fault]:
        """Train a chunk of clients. Clients with a refused reply do not change their memory."""
        with self._layer_stream(round, jobs):
            cohort = self.cohort(round, jobs)
            inbox = joined_inbox(jobs)
            sent = load_integers(cohort, inbox, self.task.initial_integers)
            message = run_training(pipeline, cohort, inbox)
            store_integers(cohort, message, sent)
        answers: list[Answer | Fault] = []
        accepted: list[int] = []
        metrics = {name: values.tolist() for name, values in cohort.metrics.items()}
        for row, job in enumerate(jobs):
            tensors = {name: rows[row] for name, rows in message.items()}
            try:
                if job.slot is not None:
                    inspect_reply(pipeline, round, tensors, expected)
            except RefusedReply as error:
                answers.append(Fault(job, str(error), error))
                continue
            accepted.append(row)
            measured = {
                name: values[row] for name, values in metrics.items() if not math.isnan(values[row])
            }
            answers.append(Answer(job, tensors, measured))
        cohort.memory.commit(accepted)
        return answers

    def evaluate(self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]) -> Iterator[Tally]:
        test = self.task.local_test
        assert test is not None, "only clients with test data are evaluated"
        models = self._results(pipeline, jobs, partial(self.personalised, pipeline, round))
        for client, row, integers in models:
            yield self.evaluator.tally(row, self.task.train, test, [client], integers)

    def personalised(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> list[tuple[int, Tensor, Tensor | None]]:
        """Return the models that clients would use, without training.

        The method receives a copy of the inbox, and its writes to the clients' memory are dropped.

        Args:
            pipeline: Pipeline of the round.
            round: The round in which clients would use the models.
            jobs: Jobs of the clients.

        Returns:
            For each client its number, its model `[P]`, and its integer buffers `[Z]` or None.
        """
        cohort = self.cohort(round, jobs)
        inbox = {name: rows.clone() for name, rows in joined_inbox(jobs).items()}
        load_integers(cohort, inbox, self.task.initial_integers)
        with self._layer_stream(round, jobs), marking_clients(cohort.clients):
            rows = pipeline.personalise(cohort, inbox)
        integers = (
            cohort.flat_module.integers() if self.task.layout.integers else [None] * len(rows)
        )
        return list(zip(cohort.clients, rows, integers, strict=True))

    def _layer_stream(self, round: Round, jobs: Sequence[Job]) -> AbstractContextManager[None]:
        """Seed torch's global generator with the client's stream, for layers such as dropout."""
        # Dropout in stacks has a stream per client. Other layers use the stream of the first one.
        client = jobs[0].client
        device = self.task.initial.device
        return global_stream(round.seed, "layers", round=round.number, client=client, device=device)

    def cohort(self, round: Round, jobs: Sequence[Job]) -> Cohort:
        """Return the cohort of a chunk of clients.

        Args:
            round: The round.
            jobs: Jobs of the clients.

        Returns:
            The cohort, with the samples and the memory of these clients.
        """
        clients = [job.client for job in jobs]
        return Cohort(
            clients,
            [self.task.samples(client) for client in clients],
            self.task.dataset,
            self._module(round, clients),
            self.task.training,
            round,
            Memory(self.store, clients),
            [job.slot is not None for job in jobs],
        )

    def _module(self, round: Round, clients: Sequence[int]) -> FlatModule:
        return self.flat_module


def joined_inbox(jobs: Sequence[Job]) -> Message:
    """Join the inboxes of k clients to tensors `[k, ...]`. Rows of all clients are not copied."""
    inbox = dict(jobs[0].inbox)
    for name, row in inbox.items() if len(jobs) > 1 else ():
        rows = [job.inbox[name] for job in jobs]
        shared = all(sent.data_ptr() == row.data_ptr() and sent.shape == row.shape for sent in rows)
        inbox[name] = row.expand(len(rows), *row.shape[1:]) if shared else torch.cat(rows)
    return inbox


def full_batch(task: Task) -> int:
    """Return the number of samples in a full batch of the largest client."""
    largest = int(task.partition.sizes.max())
    size = task.training.batch_size
    return largest if size is None else min(size, largest)
