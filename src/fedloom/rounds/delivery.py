"""Messages of a round to the clients, and replies to the server."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from fedloom.algorithm.records import INTEGERS, Exchange, Message
from fedloom.common.round import Round
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.poll import poll_pipeline
from fedloom.rounds.checks import raise_unless_absent
from fedloom.rounds.client_errors import ClientLabels
from fedloom.rounds.engine import (
    Answer,
    Engine,
    Fault,
    FoldingEngine,
    Job,
    RemoteClients,
    inbox_of,
)
from fedloom.rounds.replies import RoundReplies, capped, weights_of
from fedloom.rounds.schedule import Schedule
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task


@dataclass(frozen=True)
class Polled:
    """A poll of clients before the selection.

    Attributes:
        message: The message to the polled clients.
        clients: Number of polled clients.
        bytes_up: Bytes of their answers.
    """

    message: Message = field(default_factory=dict)
    clients: int = 0
    bytes_up: int = 0

    def bytes_down(self, sent: Message, selected: int) -> int:
        """Return the bytes of the poll's messages to the clients.

        If the round sends the same message, the selected clients receive it only once.

        Args:
            sent: The message of the round.
            selected: Number of selected clients.

        Returns:
            Bytes of all clients together.
        """
        equal = self.message.keys() == sent.keys()
        equal = equal and all(torch.equal(self.message[name], sent[name]) for name in sent)
        return message_bytes(self.message) * (self.clients - equal * selected)


@dataclass
class Delivery:
    """The jobs of a round, and its simulated times.

    Attributes:
        exchange: The record of the round.
        message: The message to the clients, with integer buffers.
        jobs: The work of the participating clients.
        faults: Selected clients that dropped out or are late. After training also clients without
            a valid reply.
        finish: Simulated time of each reply, by slot.
        seconds: Simulated time at the end of the round; None without a simulated clock.
    """

    exchange: Exchange
    message: Message
    jobs: list[Job]
    faults: list[Fault]
    finish: dict[int, float] = field(default_factory=dict)
    seconds: float | None = None

    def bytes_down(self, under_way: int) -> int:
        """Return the bytes to the clients, without `under_way` clients that receive no message."""
        selection = self.exchange.selection
        receivers = selection.receivers or len(selection.clients) + len(selection.idle)
        receivers -= sum(not fault.sent for fault in self.faults) + under_way
        return message_bytes(self.message) * receivers


class Messenger:
    """Creates the jobs of a round, simulates their times, and collects the replies.

    Args:
        task: Data and local training.
        engine: Trains the clients.
        schedule: Dropout and clock.
        numbers: The user's number of each client.
        awaited: Number of replies that end a round.
        pools: Storage of replies.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        schedule: Schedule,
        numbers: Sequence[int],
        awaited: int,
        pools: PoolFiles,
    ) -> None:
        self.task = task
        self.engine = engine
        self.schedule = schedule
        self.numbers = numbers
        self.awaited = awaited
        self.pools = pools
        self.labels = ClientLabels(task, numbers)

    def poll(self, pipeline: Pipeline, round: Round) -> Polled:
        """Poll clients before the selection, if a part of the pipeline needs it.

        Args:
            pipeline: Pipeline of the round. Only its first part with a poll in this round is used.
            round: The round, without selected clients.

        Returns:
            The poll's message and sizes; empty without a poll.
        """
        for part in pipeline.acting["poll"]:
            poll = part.poll(round)
            if poll is None:
                continue
            polling = poll_pipeline(pipeline, part)
            message = polling.deploy(round, poll.clients)
            jobs = [Job(client, k, inbox_of(message, k)) for k, client in enumerate(poll.clients)]
            answers = RoundReplies(jobs, len(jobs), len(jobs), self._weights, None)
            answers.collect(self.engine.train(polling, replace(round, selected=poll.clients), jobs))
            if answers.arrived:
                part.on_poll(answers.all_replies())
            return Polled(message, len(poll.clients), answers.bytes)
        return Polled()

    def address(
        self, pipeline: Pipeline, exchange: Exchange, integers: Tensor, now: float
    ) -> Delivery:
        """Create the jobs of a round. Remove clients that drop out or are late.

        Args:
            pipeline: Pipeline of the round.
            exchange: Record of the round.
            integers: The server's integer buffers, `[Z]`.
            now: Simulated time at the beginning of the round, in seconds.

        Returns:
            Jobs of the clients that remain, and faults of the removed clients.
        """
        round = exchange.round
        selection = exchange.selection
        message = dict(exchange.wire)
        expected = pipeline.expected(round)
        if INTEGERS in expected:
            message[INTEGERS] = integers.unsqueeze(0)
        delivery = Delivery(exchange, message, [], [])
        for slot, client in enumerate(selection.clients):
            weight = None if selection.weights is None else selection.weights[slot]
            job = Job(client, slot, inbox_of(message, slot), weight)
            chance = self.schedule.dropout
            if chance and float(torch.rand((), generator=round.stream("dropout", client))) < chance:
                delivery.faults.append(Fault(job, "dropped out", sent=False))
            else:
                delivery.jobs.append(job)
        shared = inbox_of(message, len(selection.clients))
        delivery.jobs += [Job(client, None, shared) for client in selection.idle]
        if self.schedule.clock.runs:
            upload = sum(spec.bytes for spec in expected.values())
            delivery.finish = self._finish_times(delivery.jobs, upload, now)
            delivery.seconds = now
            if not pipeline.waits:
                self._remove_late(delivery, now)
        return delivery

    def _remove_late(self, delivery: Delivery, now: float) -> None:
        """Remove the jobs that are late by the simulated clock."""
        round = delivery.exchange.round
        finish = delivery.finish
        selected = delivery.exchange.selection.clients
        numbers = [self.numbers[selected[slot]] for slot in finish]
        taken, delivery.seconds = round.on_time([*finish.values()], numbers, self.awaited, now)
        late = {slot: time - now for k, (slot, time) in enumerate(finish.items()) if k not in taken}
        remaining = []
        for job in delivery.jobs:
            if job.slot in late:
                delivery.faults.append(Fault(job, f"late: after {late[job.slot]:.6g} s"))
            else:
                remaining.append(job)
        delivery.jobs = remaining

    def _finish_times(self, jobs: Sequence[Job], upload: int, now: float) -> dict[int, float]:
        """Return the simulated arrival time of each reply by slot. Replies have `upload` bytes."""
        uploads = [(job, job.slot) for job in jobs if job.slot is not None]
        clients = torch.tensor([job.client for job, _ in uploads], dtype=torch.int64)
        arrivals = {}
        for (job, slot), size in zip(uploads, self.task.sizes(clients).tolist(), strict=True):
            device = self.schedule.clock.device(self.schedule.seed, self.numbers[job.client])
            samples = self.task.training.samples_seen(int(size))
            arrivals[slot] = device.finish(now, samples, message_bytes(job.inbox), upload)
        return arrivals

    def deliver(self, pipeline: Pipeline, delivery: Delivery, observed: bool) -> RoundReplies:
        """Train the clients, and collect their replies.

        Replies are folded on arrival, unless the pipeline, an observer or the limits on remote
        clients need all replies at once.

        Args:
            pipeline: Pipeline of the round.
            delivery: Jobs of the round. Clients without a valid reply are added to its faults.
            observed: True if an observer reads the replies.

        Returns:
            Valid replies by slot, or their aggregate.

        Raises:
            Diverged: The training of all clients diverged.
            RefusedReply: No reply is valid, and a reply was refused.
        """
        exchange = delivery.exchange
        round = delivery.exchange.round
        fold = pipeline.folds and not observed and not isinstance(self.engine, RemoteClients)
        answers = RoundReplies(
            delivery.jobs,
            len(exchange.selection.clients),
            pipeline.block_size,
            self._weights,
            partial(pipeline.fold, round) if fold else None,
            self.pools,
            exchange,
        )
        if fold and isinstance(self.engine, FoldingEngine):
            answers.collect(self.engine.train(pipeline, round, delivery.jobs, fold=exchange))
        else:
            answers.collect(self.engine.train(pipeline, round, delivery.jobs))
        if not answers.arrived:
            raise_unless_absent(pipeline.algorithm, round, answers.faults, self.labels)
        delivery.faults += answers.faults
        return answers

    def _weights(self, replies: Sequence[Answer]) -> Tensor:
        """Return the weights of replies. Sample counts of remote clients are capped."""
        weights = weights_of(self.task, replies)
        has_weights = any(reply.job.weight is not None for reply in replies)
        if has_weights or not isinstance(self.engine, RemoteClients):
            return weights
        return capped(weights, self.engine.largest_share)


def message_bytes(message: Message) -> int:
    """Return the bytes of one row of a message."""
    return sum(math.prod(rows.shape[1:]) * rows.element_size() for rows in message.values())
