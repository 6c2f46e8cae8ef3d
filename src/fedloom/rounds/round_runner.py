"""The phases of one round: selection, messages, training, the server's step and evaluation."""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.algorithm.records import INTEGERS, Aggregate, Replies
from fedloom.common.device import moved_back
from fedloom.common.round import Round
from fedloom.parts.course import Course
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.archive import Archive
from fedloom.rounds.checks import checked_model, require_converging, require_message
from fedloom.rounds.client_errors import MOST_NOTICES, fault_notices, naming_clients
from fedloom.rounds.delivery import Delivery, Messenger
from fedloom.rounds.engine import RemoteClients
from fedloom.rounds.evaluation import Evaluation, Record
from fedloom.rounds.replies import RoundReplies
from fedloom.rounds.round_record import finite, metrics_by_client, round_record, timing
from fedloom.rounds.schedule import Schedule

Lines = tuple[Record, Record, Record | None, Record | None]
"""Figures of a round, its times, and the figures and training metrics by client (None: none)."""


class RoundRunner:
    """Runs single rounds, and has the state that they change.

    Args:
        course: The pipelines of the run, set up.
        schedule: Participation, dropout and clock.
        evaluation: Measures the models of a task in an engine.
        archive: Files of the run, and its observers.

    Attributes:
        integers: The server's integer buffers, `[Z]`.
        notices: Notices about clients that failed, by reason.
    """

    def __init__(
        self, course: Course, schedule: Schedule, evaluation: Evaluation, archive: Archive
    ) -> None:
        self.course = course
        self.evaluation = evaluation
        self._task = evaluation.task
        self._engine = evaluation.engine
        self._schedule = schedule
        self._archive = archive
        self.integers = self._task.initial_integers.clone()
        self.notices: dict[str, str] = {}
        self._messenger = Messenger(
            self._task,
            self._engine,
            schedule,
            evaluation.numbers,
            schedule.participants(course.plan.clients),
            archive.pools,
        )

    def state(self) -> dict[str, Tensor]:
        """Return the server's state by path, with its integer buffers."""
        return {**self.course.state(), INTEGERS: self.integers}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned, and count the releases in the ledger."""
        server = dict(state)
        self.integers = server.pop(INTEGERS)
        self.course.restore(server)
        self._archive.accounts.count()

    def resume(self, saved: Mapping[str, Tensor] | None) -> None:
        """Continue from the state of a checkpoint; None if the run has no checkpoint.

        Raises:
            CheckpointError: Another version of fedloom wrote the state.
        """
        if saved is None:
            self._archive.accounts.count()
            return
        state = moved_back(saved, self.state(), self._task.initial.device)
        self.course.require_state(state)
        self.restore(state)

    def run(self, round: Round, now: float) -> Lines:
        """Run the phases of a round, without writing its lines.

        Args:
            round: The round, before its selection.
            now: Simulated time at the beginning of the round, in seconds.

        Returns:
            The lines of the files with figures, times, figures of clients and metrics of their
            training.

        Raises:
            Exception: As the method, the model, the loss or the engine. The text of an error in a
                client's work has the round and the names of the clients.
        """
        with naming_clients(round, self._messenger.labels):
            return self._run(round, now)

    def _run(self, round: Round, now: float) -> Lines:
        times = {"began": time.perf_counter()}
        observed = bool(self._archive.observers)
        pipeline = self.course.at(round.number)
        round = replace(round, closes=self._schedule.clock.closes(now))
        polled = self._messenger.poll(pipeline, round)
        selection = pipeline.select(round)
        exchange = pipeline.open(replace(round, selected=selection.clients), selection)
        require_message(exchange, pipeline.algorithm)
        delivery = self._messenger.address(pipeline, exchange, self.integers, now)
        self._archive.accounts.record(exchange)
        under_way = frozenset[int]()
        if isinstance(self._engine, RemoteClients):
            under_way = self._engine.under_way
        answers = self._messenger.deliver(pipeline, delivery, observed)
        times["trained"] = time.perf_counter()
        self._notice_faults(round, answers)
        outcome = self._outcome(delivery, answers)
        times["observed"] = time.perf_counter()
        model = self._close(pipeline, delivery, answers, outcome)
        times["received"] = time.perf_counter()
        reported = pipeline.report()
        record = round_record(
            delivery, answers, polled, reported, self.evaluation.numbers, under_way
        )
        clients = self._evaluate(delivery.exchange.round, record, model, answers)
        metrics = metrics_by_client(round.number, answers, self.evaluation.numbers)
        return record, timing(round.number, times, observed), clients, metrics

    def _notice_faults(self, round: Round, answers: RoundReplies) -> None:
        """Add notices about clients that failed. The log of real sites names their faults."""
        if isinstance(self._engine, RemoteClients):
            return
        for reason, text in fault_notices(round, answers.faults, self._messenger.labels).items():
            if len(self.notices) < MOST_NOTICES:
                self.notices.setdefault(reason, text)

    def _outcome(self, delivery: Delivery, answers: RoundReplies) -> Replies | Aggregate | None:
        """Return the replies after the observers have read them, or the aggregate if folded."""
        if answers.fold is not None:
            return answers.aggregate
        replies = answers.all_replies()
        for observer in self._archive.observers:
            observer.observe(delivery.exchange.round, delivery.jobs, replies)
        replies.integers = replies.matrices.pop(INTEGERS, None)
        if replies.integers is not None:
            missing = torch.ones(len(replies.integers), dtype=torch.bool)
            missing[replies.index] = False
            replies.integers[missing] = self.integers.to(replies.integers.device)
        if delivery.finish:
            arrivals = [delivery.finish[slot] for slot in replies.slots.tolist()]
            replies.finish = torch.tensor(arrivals, dtype=torch.float64)
        return replies if answers.arrived else None

    def _close(
        self,
        pipeline: Pipeline,
        delivery: Delivery,
        answers: RoundReplies,
        outcome: Replies | Aggregate | None,
    ) -> Tensor:
        """Run the server's step and begin the next stage, if any. Return the global model."""
        exchange = delivery.exchange
        if answers.integers is not None and len(answers.integers):
            self.integers = pipeline.merge_integers(answers.integers, self.integers)
        pipeline.close(exchange, outcome)
        pipeline.finish(exchange)
        self._archive.accounts.count()
        self.course.next(exchange.round.number)
        upcoming = self.course.at(exchange.round.number + 1)
        return checked_model(upcoming, self.course.method, self._task.initial)

    def _evaluate(
        self, round: Round, record: Record, model: Tensor, answers: RoundReplies
    ) -> Record | None:
        """Evaluate the models and add their figures to `record`. Return the figures by client."""
        upcoming = self.course.at(round.number + 1)
        figures, clients = self.evaluation.measure(
            upcoming, round, model, self.integers, upcoming.spent
        )
        suspect = self._messenger.labels.highest_loss(answers)
        require_converging(self._task, round, model, figures.get("loss"), suspect)
        record |= figures
        for name, value in record.items():
            record[name] = finite(value)
        return clients
