"""The round: select, send, train, reply, receive, evaluate, record; with checkpoints, so that nothing is lost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Plan, Replies, Selection
from fedloom.checkpoint import Checkpoint, Checkpoints, RoundLog, without_gap
from fedloom.checks import require_at_least, require_between, require_share
from fedloom.engines.base import Engine, Fault, Order, Reply
from fedloom.engines.local import INTEGERS
from fedloom.errors import CheckpointError, Diverged, InvalidValue
from fedloom.evaluation import Evaluator
from fedloom.round import Round
from fedloom.task import Task

Record = dict[str, Any]
"""The figures of one round, ready for JSON."""


@dataclass(frozen=True)
class Schedule:
    """How long a federation runs and how often it looks at itself.

    `participation` is the share of clients in a round, K = max(1, floor(participation * clients)); `dropout` the chance that
    a selected client does not answer (for studying it; drawn from its own stream).
    """

    rounds: int = 100
    participation: float = 0.1
    seed: int = 0
    evaluate_every: int = 1
    checkpoint_every: int = 10
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require_at_least("rounds", self.rounds, 1)
        require_share("participation", self.participation)
        require_at_least("evaluate_every", self.evaluate_every, 1)
        require_at_least("checkpoint_every", self.checkpoint_every, 1)
        require_between("dropout", self.dropout, 0, 1)


class Federation:
    """One method on one task in one engine, round after round.

    With a `directory`, figures are appended to `metrics.jsonl` (the same in every repetition) and `timings.jsonl`, and
    checkpoints are kept there; a federation made again with the same arguments continues from the newest one.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        engine: Engine,
        schedule: Schedule,
        directory: Path | None = None,
        identity: str = "",
    ) -> None:
        self.algorithm, self.task, self.engine, self.schedule = algorithm, task, engine, schedule
        self.evaluator = Evaluator(task.model, task.layout, task.dataset)
        self.integers = task.initial_integers.clone()
        self.history: list[Record] = []
        self.timings: list[Record] = []
        self._midway = False  # a round has begun and not ended: the state belongs to no round
        # floor, but 0.3 * 10 must give 3 although the product is 2.9999999999999996 in binary
        participants = max(1, int(schedule.participation * task.clients + 1e-9))
        training = task.training
        self._first = Round(
            1,
            schedule.rounds,
            schedule.seed,
            task.clients,
            participants,
            training.rate(1),
            training.rate(1),
            training.decay,
        )
        algorithm.setup(
            Plan(
                task.layout, task.initial, task.clients, participants, schedule.rounds, schedule.seed,
                task.dataset.classes, task.sizes, task.model,
            )
        )  # fmt: skip
        self.checkpoints = None if directory is None else Checkpoints(directory, identity)
        self._logs = (
            None
            if directory is None
            else (RoundLog(directory / "metrics.jsonl"), RoundLog(directory / "timings.jsonl"))
        )
        self._resume()

    @property
    def finished(self) -> int:
        """Rounds finished so far."""
        return len(self.history)

    @property
    def notices(self) -> list[str]:
        """What there is to say about the checkpoints found at the start, a line each."""
        return [] if self.checkpoints is None else self.checkpoints.notices

    def run(self, on_round: Callable[[Record, Record], None] | None = None) -> None:
        """Run the remaining rounds; `on_round` is called after each with its figures and its times.

        An interruption (Ctrl-C) or an error between two rounds leaves a checkpoint of the last finished round behind. One
        in the middle of a round leaves the checkpoint before it: some clients have trained already, so the state is that
        of no round. Raises `CheckpointError` when that has happened to this federation.
        """
        if self._midway:
            raise CheckpointError(
                f"round {self.finished + 1} was interrupted: make the federation again to go on from its last checkpoint"
            )
        saved = self.finished
        try:
            while self.finished < self.schedule.rounds:
                record, timing = self.step()
                if on_round is not None:
                    on_round(record, timing)
                if self.finished % self.schedule.checkpoint_every == 0 or self.finished == self.schedule.rounds:
                    self.save()
                    saved = self.finished
        finally:
            if saved < self.finished and not self._midway:
                self.save()

    def step(self) -> tuple[Record, Record]:
        """One round. Nothing of the federation changes before every reply is in."""
        self._midway = True
        began = time.perf_counter()
        round = self._first.at(self.finished + 1)
        selection = self.algorithm.select(round)
        round = replace(round, selected=selection.clients)
        message = dict(self.algorithm.send(round))
        if self.task.layout.integers:
            message[INTEGERS] = self.integers.unsqueeze(0)
        orders, absent = self._orders(round, selection, message)
        replies, faults, received_bytes = self._collect(
            round, selection, self.engine.train(self.algorithm, round, orders)
        )
        trained = time.perf_counter()
        if len(replies):
            self.algorithm.receive(round, replies)
        self.algorithm.finish(round)
        received = time.perf_counter()
        receivers = selection.receivers or len(selection.clients) + len(selection.idle)
        record: Record = {
            "round": round.number,
            "clients": list(selection.clients),
            "bytes_down": sum(_row_bytes(rows) for rows in message.values()) * receivers,
            "bytes_up": received_bytes,
            "faults": [{"client": f.order.client, "reason": f.reason} for f in [*absent, *faults]],
            **{name: float(values.mean()) for name, values in replies.metrics.items() if len(values)},
        }
        if round.number % self.schedule.evaluate_every == 0 or round.number == self.schedule.rounds:
            score = self.evaluator.score(self.algorithm.model(), self.task.test, self.integers)
            record |= {"accuracy": score.accuracy, "loss": score.loss, **self.algorithm.diagnose()}
        ended = time.perf_counter()
        timing: Record = {
            "round": round.number,
            "seconds": ended - began,
            "train_seconds": trained - began,
            "server_seconds": received - trained,
            "evaluate_seconds": ended - received,
        }
        record = {name: _finite(value) for name, value in record.items()}
        self._record(record, timing)
        self._midway = False
        return record, timing

    def _orders(self, round: Round, selection: Selection, message: Message) -> tuple[list[Order], list[Fault]]:
        """The work of everybody who is there, and who is absent."""
        orders, absent = [], []
        for slot, client in enumerate(selection.clients):
            inbox = {name: _row(rows, slot) for name, rows in message.items()}
            order = Order(client, slot, inbox)
            chance = self.schedule.dropout and float(torch.rand((), generator=round.stream("dropout", client)))
            if chance < self.schedule.dropout:
                absent.append(Fault(order, "dropped out"))
            else:
                orders.append(order)
        if selection.idle:
            last = len(selection.clients)
            if any(len(rows) not in (1, last + 1) for rows in message.values()):
                raise InvalidValue("the message has no row for the clients that train without uploading")
            shared = {name: _row(rows, last) for name, rows in message.items()}
            orders += [Order(client, None, shared) for client in selection.idle]
        return orders, absent

    def _collect(
        self, round: Round, selection: Selection, results: Iterable[Reply | Fault]
    ) -> tuple[Replies, list[Fault], int]:
        """Replies in the order of their slots, each written once into the matrix that holds them all."""
        matrices: dict[str, Tensor] = {}
        arrived: list[Reply] = []
        faults: list[Fault] = []
        size = 0
        for result in results:
            if isinstance(result, Fault):
                faults.append(result)
            elif result.order.slot is not None:
                for name, tensor in result.tensors.items():
                    if name not in matrices:
                        matrices[name] = tensor.new_empty(len(selection.clients), *tensor.shape)
                    matrices[name][result.order.slot] = tensor
                    size += _row_bytes(tensor.unsqueeze(0))
                arrived.append(replace(result, tensors={}))
        arrived.sort(key=lambda reply: reply.order.slot or 0)
        if not arrived:
            _raise_when_hopeless(round, faults)
        slots = torch.tensor([reply.order.slot for reply in arrived], dtype=torch.int64)
        clients = torch.tensor([reply.order.client for reply in arrived], dtype=torch.int64)
        whole = len(arrived) == len(selection.clients)
        tensors = {name: matrix if whole else matrix[slots] for name, matrix in matrices.items()}
        if INTEGERS in tensors and len(arrived):
            self.integers = tensors.pop(INTEGERS).amax(0)
        weights = self.task.sizes(clients) if selection.weights is None else torch.tensor(selection.weights)[slots]
        names = {name for reply in arrived for name in reply.metrics}
        metrics = {n: torch.tensor([r.metrics[n] for r in arrived if n in r.metrics]) for n in sorted(names)}
        return Replies(tensors, clients, slots, weights, metrics), faults, size

    def _record(self, record: Record, timing: Record) -> None:
        self.history.append(record)
        self.timings.append(timing)
        if self._logs is not None:
            for log, line in zip(self._logs, (record, timing), strict=True):
                log.append(line)

    def save(self) -> None:
        """Write a checkpoint now."""
        if self.checkpoints is not None:
            for log in self._logs or ():
                log.sync()
            server = {**self.algorithm.full_state(), "integers": self.integers}
            self.checkpoints.save(Checkpoint(self.finished, server, self.engine.memory()))

    def _resume(self) -> None:
        if self.checkpoints is None or self._logs is None:
            return
        found = self.checkpoints.latest(without_gap(self._logs[0].read()))
        self.history, self.timings = (log.resume(0 if found is None else found.round) for log in self._logs)
        if found is not None:
            server = dict(found.server)
            self.integers = server.pop("integers")
            self.algorithm.restore(server)
            self.engine.restore_memory(found.clients)


def _finite(value: Any) -> Any:
    """JSON has no word for infinite or undefined figures."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(rows: Tensor, place: int) -> Tensor:
    """What the receiver at `place` is sent of `[k, ...]`, with its leading axis; one row is for all."""
    return rows[place : place + 1] if len(rows) > 1 else rows


def _row_bytes(rows: Tensor) -> int:
    """Bytes of one row of `[k, ...]`."""
    return rows[0].numel() * rows.element_size()


def _raise_when_hopeless(round: Round, faults: list[Fault]) -> None:
    """A round without a single reply goes on only when its clients were merely absent."""
    if faults and all(fault.diverged for fault in faults):
        raise Diverged(
            f"round {round.number}: no client's model is finite any more (learning rate {round.learning_rate:g}): "
            "training diverged; the last checkpoint holds the last good model"
        )
    errors = [fault.error for fault in faults if fault.error is not None]
    if errors:
        raise errors[0]
