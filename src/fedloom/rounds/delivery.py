"""Delivery of a round's messages to clients, and of their replies to the server."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from fedloom.flat.population import capped
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.poll import poll_pipeline
from fedloom.records import INTEGERS, Exchange, Message
from fedloom.round import Round
from fedloom.rounds.checks import raise_unless_absent
from fedloom.rounds.engine import (
    Answer,
    Engine,
    Fault,
    FoldingEngine,
    Job,
    RemoteClients,
    inbox_of,
)
from fedloom.rounds.replies import RoundReplies, weights_of
from fedloom.rounds.schedule import Schedule
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task


@dataclass(frozen=True)
class Polled:
    """A poll: what clients were sent, how many were asked, and the bytes of their answers."""

    message: Message = field(default_factory=dict)
    clients: int = 0
    bytes_up: int = 0

    def bytes_down(self, sent: Message, selected: int) -> int:
        """Return the bytes of the question; selected clients are not sent the same message twice."""
        same = self.message.keys() == sent.keys()
        same = same and all(torch.equal(self.message[name], sent[name]) for name in sent)
        return message_bytes(self.message) * (self.clients - same * selected)


@dataclass
class Delivery:
    """The work that goes out in a round.

    Attributes:
        exchange: The record of the round.
        message: What travels, with integer buffers.
        jobs: The work of the clients that take part.
        faults: Selected clients that dropped out or are late, later also those whose reply is
            missing.
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
        """Return the bytes that were sent; `under_way` clients were sent nothing."""
        selection = self.exchange.selection
        receivers = selection.receivers or len(selection.clients) + len(selection.idle)
        receivers -= sum(not fault.sent for fault in self.faults) + under_way
        return message_bytes(self.message) * receivers


class Post:
    """Addresses messages, times them by the simulated clock, and collects replies.

    `numbers` are the clients' numbers for the user, `awaited` the replies that end a round.
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
        self.task, self.engine, self.schedule = task, engine, schedule
        self.numbers, self.awaited, self.pools = numbers, awaited, pools

    def poll(self, pipeline: Pipeline, round: Round) -> Polled:
        """Ask clients what a part wants to know before the selection."""
        for part in pipeline.acting["poll"]:
            poll = part.poll(round)
            if poll is None:
                continue
            asking = poll_pipeline(pipeline, part)
            message = asking.deploy(round, poll.clients)
            tasks = [Job(client, k, inbox_of(message, k)) for k, client in enumerate(poll.clients)]
            answers = RoundReplies(tasks, len(tasks), len(tasks), self._weights, None)
            answers.collect(self.engine.train(asking, replace(round, selected=poll.clients), tasks))
            if answers.arrived:
                part.on_poll(answers.together())
            return Polled(message, len(poll.clients), answers.bytes)
        return Polled()

    def address(
        self, pipeline: Pipeline, exchange: Exchange, integers: Tensor, now: float
    ) -> Delivery:
        """Return the jobs of all clients that take part, and the clients that drop out or are late.

        Args:
            pipeline: The pipeline of the round.
            exchange: The record of the round.
            integers: The server's integer buffers, `[Z]`.
            now: Simulated time at the beginning of the round.
        """
        round, selection, message = exchange.round, exchange.selection, dict(exchange.wire)
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
                self._leave_out_late(delivery, now)
        return delivery

    def _leave_out_late(self, delivery: Delivery, now: float) -> None:
        """Let the simulated clock decide which replies are late."""
        round, selection, finish = (
            delivery.exchange.round,
            delivery.exchange.selection,
            delivery.finish,
        )
        numbers = [self.numbers[selection.clients[slot]] for slot in finish]
        taken, delivery.seconds = round.on_time([*finish.values()], numbers, self.awaited, now)
        late = {slot: time - now for k, (slot, time) in enumerate(finish.items()) if k not in taken}
        remaining = []
        for task in delivery.jobs:
            if task.slot in late:
                delivery.faults.append(Fault(task, f"late: after {late[task.slot]:.6g} s"))
            else:
                remaining.append(task)
        delivery.jobs = remaining

    def _finish_times(self, tasks: Sequence[Job], upload: int, now: float) -> dict[int, float]:
        """Return by slot when the simulated clock has each reply, of `upload` bytes."""
        uploads = [(task, task.slot) for task in tasks if task.slot is not None]
        clients = torch.tensor([task.client for task, _ in uploads], dtype=torch.int64)
        arrivals = {}
        for (task, slot), size in zip(uploads, self.task.sizes(clients).tolist(), strict=True):
            device = self.schedule.clock.device(self.schedule.seed, self.numbers[task.client])
            samples = self.task.training.samples_seen(int(size))
            arrivals[slot] = device.finish(now, samples, message_bytes(task.inbox), upload)
        return arrivals

    def deliver(self, pipeline: Pipeline, delivery: Delivery, observed: bool) -> RoundReplies:
        """Let the clients train, and collect their replies.

        Replies are folded as they arrive unless the pipeline, an observer or limits on remote
        clients need all of them.
        """
        exchange, round = delivery.exchange, delivery.exchange.round
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
            raise_unless_absent(pipeline.algorithm, round, answers.faults)
        delivery.faults += answers.faults
        return answers

    def _weights(self, replies: Sequence[Answer]) -> Tensor:
        """Return the weights of replies: those of the selection, or else the samples of their
        clients.
        """
        weights = weights_of(self.task, replies)
        given = any(reply.job.weight is not None for reply in replies)
        if given or not isinstance(self.engine, RemoteClients):
            return weights
        return capped(weights, self.engine.largest_share)


def message_bytes(message: Message) -> int:
    """Return the bytes of one row of a message."""
    return sum(math.prod(rows.shape[1:]) * rows.element_size() for rows in message.values())
