"""Flower engine: clients train at real sites; each site gets one message and returns one.

A site that is absent, late, or sends an unexpected answer loses its turn, but the round continues.

Clients' memory stays at their sites, in versions that are numbered by the round that wrote them.
The server stores the version from which each client continues: the version after the last reply
that it accepted. Therefore a reply that was late or refused has no effect.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.algorithm.records import TensorSpec
from fedloom.common.errors import DamagedCheckpoint, FedloomError, InvalidValue, RefusedReply
from fedloom.common.round import Round
from fedloom.engines.base import inspect_reply
from fedloom.objectives.metrics import counted_shapes, require_defined
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Answer, Fault, Job, RemoteClients
from fedloom.rounds.scoring import Tally
from fedloom.sites.known_sites import MOST_SAMPLES, KnownSites, Orders
from fedloom.sites.messages import (
    ARRAYS,
    Refusal,
    Words,
    figures_of,
    tensors_of,
    whole_number,
    words_of,
)
from fedloom.sites.secure_round import SecureRound, layer_exchange
from fedloom.task import Task

_logger = logging.getLogger("flwr.fedloom")


class FlowerEngine(RemoteClients):
    """Lets sites train. No site has more than `largest_share` of a round's mean."""

    in_process: bool | None = None

    def __init__(self, sites: KnownSites, largest_share: float = 1.0) -> None:
        self.sites = sites
        self.numbers = sites.numbers
        self.largest_share = largest_share
        self.notices: list[str] = []

    def begin(self, task: Task, directory: Path | None) -> None:
        self.task = task
        # versions of the clients' memory before and after this round; 0: no memory
        self._committed = torch.zeros(task.clients, dtype=torch.int64)
        self._versions = self._committed.clone()
        self._orders: Orders = {}  # unanswered requests of an asynchronous method
        self._saved = [self._committed, self._committed]  # versions in the two newest checkpoints
        self._saving = self._committed
        # clients that failed since the last accepted reply, with the reason
        self._failing: dict[int, str] = {}

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> Iterator[Answer | Fault]:
        method = layer_exchange(pipeline)
        if method is not None:
            train = partial(self.train_at_sites, pipeline, round)
            yield from SecureRound(self.sites, self.task, method, round, train, self.forget).train(
                jobs
            )
        else:
            yield from self.train_at_sites(pipeline, round, jobs)

    def train_at_sites(
        self,
        pipeline: Pipeline,
        round: Round,
        jobs: Sequence[Job],
        exchanged: bool = False,
        withheld: bool = False,
    ) -> Iterator[Answer | Fault]:
        """Let sites train and yield their replies.

        Args:
            pipeline: The method.
            round: The round.
            jobs: The clients' work.
            exchanged: Sites start from the models that they exchanged before.
            withheld: Models are not part of the replies; sites exchange them afterwards.

        Yields:
            An answer or a fault for each job.

        Raises:
            FedloomError: Every site has failed since the last accepted reply.
        """
        expected = pipeline.expected(round)
        shapes = {name: list(spec.shape) for name, spec in expected.items()}
        if withheld:
            del expected["model"]
        figures = {name for method in pipeline.components() for name in method.client_figures}

        def words(job: Job) -> Words:
            client = job.client
            uploads = job.slot is not None
            keep = sorted({int(saved[client]) for saved in self._saved} - {0})
            due = shapes if uploads else None
            memory = int(self._versions[client])
            return {
                "memory": memory,
                "keep": keep,
                "expected": due,
                "exchanged": exchanged and uploads,
            }

        needed = pipeline.step_replies
        taken = 0
        starting = [task for task in jobs if task.client not in self.under_way]
        orders = None if needed is None else self._orders
        for began, job, answer in self.sites.answers(
            "train", round, starting, words, orders=orders
        ):
            if isinstance(answer, Fault):
                yield answer
                continue
            try:
                due = {} if job.slot is None else expected
                reply = self._reply(pipeline, began, job, answer, due, figures)
            except FedloomError as error:
                if not (isinstance(error, Refusal) and "lost" in error.words):
                    self._failing[job.client] = str(error)
                yield Fault(job, str(error))
            else:
                self._failing.clear()
                yield reply
                taken += 1
                if taken == needed:
                    break
        introduced = {
            client for client in range(round.clients) if self.numbers[client] in self.sites.known
        }
        if introduced and introduced <= self._failing.keys():
            client, reason = next(reversed(self._failing.items()))
            failed = (
                f"every site has failed, one after another; site {self.numbers[client]}: {reason}"
            )
            raise FedloomError(f"round {round.number}: {failed}")

    @property
    def under_way(self) -> frozenset[int]:
        """Return the clients that are still training, for an asynchronous method."""
        return frozenset(job.client for _, job in self._orders.values())

    def _reply(
        self,
        pipeline: Pipeline,
        round: Round,
        job: Job,
        message: Message,
        expected: Mapping[str, TensorSpec],
        figures: set[str],
    ) -> Answer:
        """Return one site's reply.

        Raises:
            FedloomError: The site sent a reason why it did not train, or its reply is refused.
        """
        client = job.client
        number = self.numbers[job.client]
        try:
            words = words_of(message, ARRAYS)
        except Refusal as refusal:
            if refusal.words.get("lost"):
                # the client starts without memory the next time
                self._versions[client] = 0
            raise
        order = (
            whole_number(words, "round", 0, round.number),
            whole_number(words, "site", 0, MOST_SAMPLES),
        )
        if order != (round.number, number):
            raise RefusedReply("the reply is to another request")
        version = whole_number(words, "memory", 0, round.number)
        if version not in (int(self._versions[client]), round.number):
            raise RefusedReply(f"memory {version} was neither sent nor written in this round")
        # The method decides about names, shapes and types, not the site.
        tensors = tensors_of(message, expected)
        if expected:
            inspect_reply(pipeline, round, tensors, expected)
        measured = figures_of(words, figures)
        self._versions[client] = version
        samples = self.sites.samples(number) if self.task.elsewhere else None
        return Answer(job, tensors, measured, samples=samples)

    def evaluate(self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]) -> Iterator[Tally]:
        as_sent = type(pipeline.algorithm) is Algorithm  # every client evaluates the received model

        def words(job: Job) -> Words:
            return {"memory": int(self._versions[job.client]), "given": as_sent}

        for _, job, answer in self.sites.answers("evaluate", round, jobs, words):
            try:
                if isinstance(answer, Fault):
                    raise FedloomError(answer.reason)
                yield self._tally(job.client, words_of(answer))
            except FedloomError as error:
                _logger.warning("site %d is not evaluated: %s", self.numbers[job.client], error)

    def _tally(self, client: int, words: Mapping[str, Any]) -> Tally:
        """Return a site's totals, scaled down if it counted more samples than it registered.

        Raises:
            RefusedReply: The counts are impossible.
        """
        local_test = self.task.local_test
        registered = 0 if local_test is None else int(local_test.sizes[client])
        samples = whole_number(words, "samples", 1, MOST_SAMPLES)
        objective = self.task.objective
        outputs = self.task.dataset.spec.outputs
        try:
            counted = words["totals"]
            shapes = objective.shapes(outputs) | counted_shapes(self.task.dataset.metrics)
            totals = {name: _total(counted[name], shape) for name, shape in shapes.items()}
            objective.require_totals({**totals, "samples": torch.tensor([float(samples)])})
            require_defined(totals, samples)
        except (KeyError, TypeError, ValueError, OverflowError, InvalidValue) as error:
            raise RefusedReply(f"the reply has no valid totals: {error}") from None
        share = min(1.0, registered / samples)
        totals = {name: total if share == 1 else total * share for name, total in totals.items()}
        return Tally(torch.tensor([client]), torch.tensor([min(samples, registered)]), totals)

    # --- clients' memory ---

    def commit(self) -> None:
        self._committed = self._versions.clone()

    def forget(self, client: int) -> None:
        """Reset a client to its memory before this round, since its work is not used."""
        self._versions[client] = self._committed[client]

    def rollback(self) -> bool:
        self._versions = self._committed.clone()
        return True

    def memory(self) -> dict[str, Tensor]:
        """Return the version of each client's memory, now and at the previous checkpoint."""
        self._saving = self._committed
        return {"versions": self._committed, "before": self._saved[-1]}

    def release_memory(self) -> None:
        self._saved = [self._saved[-1], self._saving]

    def restore_memory(self, memory: dict[str, Tensor]) -> None:
        shape = self._committed.shape
        if any(
            name not in memory or memory[name].shape != shape for name in ("versions", "before")
        ):
            raise DamagedCheckpoint("the checkpoint has no valid versions of the sites' memory")
        self._committed = memory["versions"]
        self._saved = [memory["before"], memory["versions"]]
        self.rollback()

    def close(self) -> None:
        """Do nothing: sites end their workers themselves."""


def _total(value: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a site's total as a tensor `[1, ...]` of float64.

    Raises:
        TypeError, ValueError: The value is not numbers in this shape.
    """
    total = torch.tensor(value, dtype=torch.float64)
    if total.shape != shape:
        raise ValueError(f"shape {list(total.shape)}, expected {list(shape)}")
    return total.unsqueeze(0)
