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

from fedloom.engines.base import (
    LocalEngine,
    engines,
    inspect_reply,
    keep_integers,
    load_integers,
    run_training,
)
from fedloom.engines.proof import Proof, prove
from fedloom.errors import FedloomError, RefusedReply
from fedloom.flat.device import keep_pages
from fedloom.flat.module import FlatModule
from fedloom.local.cohort import Cohort
from fedloom.parts.pipeline import Pipeline
from fedloom.randomness import global_stream
from fedloom.records import Message, Specs
from fedloom.round import Round
from fedloom.rounds.engine import Answer, Fault, Job, slot_blocks
from fedloom.rounds.scoring import Evaluator, Tally
from fedloom.state.store import BUDGET, Memory
from fedloom.task import Task

T = TypeVar("T")


@engines.register("rows")
class RowsEngine(LocalEngine):
    """Trains each client's row in place, through a module whose parameters are views of it.

    Args:
        task: What clients train.
        proof: Shortcuts that the task allows, if they were proven before.
    """

    in_process: bool | None = True
    stacks: ClassVar[bool] = False
    chunk: int = 1  # clients that advance together

    def __init__(
        self, task: Task, proof: Proof | None = None, *, memory_budget: int = BUDGET
    ) -> None:
        super().__init__(memory_budget)
        self.task = task
        self.proof = proof or prove(
            task.model, task.dataset, task.train, task.training, stack=self.stacks
        )
        self.notices += self.proof.notices
        self.ways = (
            task.model,
            task.layout,
            self.proof.shortcuts,
            task.training.autocast_dtype,
            task.objective,
        )
        self.flat_module = FlatModule(*self.ways)
        self.evaluator = Evaluator(task.model, task.layout, task.dataset)

    def begin(self, task: Task, directory: Path | None) -> None:
        self.task = task
        self.renew_notices()
        self.flat_module.autocast = task.training.autocast_dtype
        self.store.begin(directory)
        keep_pages()

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> Iterator[Answer | Fault]:
        expected = pipeline.expected(round)
        slots = pipeline.block_size
        size = slots * math.ceil(self.chunk / slots)  # no block cuts a chunk
        for block in slot_blocks(jobs, round, size).values():
            yield from self.train_block(pipeline, round, block, expected)

    def train_block(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job], expected: Specs
    ) -> Iterator[Answer | Fault]:
        """Train the clients of a block.

        Args:
            pipeline: The pipeline of the round.
            round: The round.
            jobs: The clients' jobs.
            expected: What replies must contain. A worker cannot ask the server's half of a method.
        """
        train = partial(self.train_chunk, pipeline, round, expected)
        return self._results(pipeline, jobs, train)

    def _results(
        self, pipeline: Pipeline, jobs: Sequence[Job], work: Callable[[Sequence[Job]], list[T]]
    ) -> Iterator[T]:
        """Yield the results of `work` on clients that advance together: here, on one after another."""
        for job in jobs:
            yield from work([job])

    def train_chunk(
        self, pipeline: Pipeline, round: Round, expected: Specs, jobs: Sequence[Job]
    ) -> list[Answer | Fault]:
        """Train clients that advance together.

        The error of a client that trains by itself becomes its `Fault`. A mistake in the
        configuration is raised, since it is not the client's fault.
        """
        try:
            return self._answers(pipeline, round, expected, jobs)
        except FedloomError:
            raise
        except Exception as error:
            if len(jobs) > 1:
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the failed step
            return [Fault(jobs[0], f"{type(error).__name__}: {error}", error)]

    @torch.enable_grad()
    def _answers(
        self, pipeline: Pipeline, round: Round, expected: Specs, jobs: Sequence[Job]
    ) -> list[Answer | Fault]:
        """Train clients that advance together. Those whose reply is refused keep their memory from
        before the round.
        """
        with self._drawing_layers(round, jobs):
            cohort = self.cohort(round, jobs)
            inbox = joined_inbox(jobs)
            sent = load_integers(cohort, inbox, self.task.initial_integers)
            message = run_training(pipeline, cohort, inbox)
            keep_integers(cohort, message, sent)
        answers: list[Answer | Fault] = []
        accepted = []
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
        assert test is not None, "only clients with test data of their own are evaluated"
        models = self._results(pipeline, jobs, partial(self.personalised, pipeline, round))
        for client, row, integers in models:
            yield self.evaluator.tally(row, self.task.train, test, [client], integers)

    def personalised(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> list[tuple[int, Tensor, Tensor | None]]:
        """Return each client, the model `[P]` that it would use in `round`, and its integer buffers
        if any.

        The method works on a copy of the inbox, and its writes to the clients' memory are dropped.
        """
        cohort = self.cohort(round, jobs)
        inbox = {name: rows.clone() for name, rows in joined_inbox(jobs).items()}
        load_integers(cohort, inbox, self.task.initial_integers)
        with self._drawing_layers(round, jobs):
            rows = pipeline.personalise(cohort, inbox)
        integers = (
            cohort.flat_module.integers() if self.task.layout.integers else [None] * len(rows)
        )
        return list(zip(cohort.clients, rows, integers, strict=True))

    def _drawing_layers(self, round: Round, jobs: Sequence[Job]) -> AbstractContextManager[None]:
        """Let layers that draw, such as dropout, draw from the client's stream: they know only
        torch's global generator.
        """
        # Dropout in stacks has a stream for each client. All other draws are those of the first.
        client, device = jobs[0].client, self.task.initial.device
        return global_stream(round.seed, "layers", round=round.number, client=client, device=device)

    def cohort(self, round: Round, jobs: Sequence[Job]) -> Cohort:
        """Return the cohort of clients that train together: here, of one."""
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
    """Return the inboxes of k clients as one, without a copy of a row that all share."""
    inbox = dict(jobs[0].inbox)
    for name, row in inbox.items() if len(jobs) > 1 else ():
        rows = [job.inbox[name] for job in jobs]
        shared = all(sent.data_ptr() == row.data_ptr() and sent.shape == row.shape for sent in rows)
        inbox[name] = row.expand(len(rows), *row.shape[1:]) if shared else torch.cat(rows)
    return inbox


def full_batch(task: Task) -> int:
    """Return the samples of a full batch of the largest client."""
    largest, size = int(task.partition.sizes.max()), task.training.batch_size
    return largest if size is None else min(size, largest)
