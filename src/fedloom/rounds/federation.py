"""The round loop: one method on one task in one engine, with logs and checkpoints."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedloom.errors import CheckpointError
from fedloom.flat.device import moved_back
from fedloom.method import Method
from fedloom.parts.course import Course, pipelines
from fedloom.parts.pipeline import Pipeline
from fedloom.records import INTEGERS, Aggregate, Plan, Replies
from fedloom.round import Round
from fedloom.rounds.accounts import Accounts
from fedloom.rounds.archive import Archive
from fedloom.rounds.checkpoint import Checkpoints
from fedloom.rounds.checks import checked_model, require_converging, require_message
from fedloom.rounds.delivery import Delivery, Messenger
from fedloom.rounds.engine import Engine, Job, RemoteClients
from fedloom.rounds.evaluation import (
    Evaluation,
    Record,
    clients_without_steps,
    newcomers_last,
    untrained,
)
from fedloom.rounds.observer import Observer
from fedloom.rounds.opening import opening
from fedloom.rounds.pool_watch import PoolWatch
from fedloom.rounds.replies import RoundReplies
from fedloom.rounds.round_record import finite, round_record, timing
from fedloom.rounds.schedule import Schedule as Schedule
from fedloom.rounds.termination import sigterm_interrupts, uninterrupted
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task

Lines = tuple[Record, Record, Record | None]
"""Figures of a round, its times, and the figures by client (None if not measured)."""


class Federation:
    """Runs the rounds of one method on one task in one engine.

    With a `directory`, each round appends its figures to `metrics.jsonl`, the figures of single
    clients to `clients.jsonl`, and its times and new notices to `timings.jsonl`. The directory also
    contains the checkpoints, client memory that does not fit into them (`clients`), and pools
    larger than the schedule's `pool_budget` (`pool`). A run with such a pool saves a checkpoint in
    every round. A new federation with the same arguments continues from the newest checkpoint of
    the same `identity`.

    Figures name clients by the numbers of `task`. If some clients never train
    (`Schedule.new_clients`), `self.task` has these clients last, and the method and the engine use
    the numbers in this order.

    Args:
        algorithm: The method.
        task: Data, model and local training.
        engine: Trains the clients.
        schedule: Rounds, participation, evaluation and checkpoints.
        directory: Folder of the run. None writes no files.
        identity: Text that identifies the run. Checkpoints of other runs are refused.
        observers: Record data of each round.
    """

    def __init__(
        self,
        algorithm: Method,
        task: Task,
        engine: Engine,
        schedule: Schedule,
        directory: Path | None = None,
        identity: str = "",
        observers: Sequence[Observer] = (),
    ) -> None:
        self.algorithm, self.engine, self.schedule = algorithm, engine, schedule
        self.observers = observers
        newcomers = schedule.newcomers(task.clients)
        self.task, self.numbers = newcomers_last(task, newcomers, schedule.seed)
        self.trainers = task.clients - newcomers
        self.evaluation = Evaluation(self.task, engine, schedule, self.trainers, self.numbers)
        self.integers = task.initial_integers.clone()
        self.finished = self._saved = 0  # rounds, now and at the last checkpoint
        self._pool_watch = PoolWatch(task.test.labels, schedule.rounds)
        self._reported: set[str] = set()  # notices that `timings.jsonl` already contains
        self._midway = False  # within a round, the state belongs to no finished round
        self._now = 0.0  # simulated time in seconds
        self._pools = PoolFiles(
            None if directory is None else directory / "pool", schedule.pool_budget
        )
        remote = isinstance(engine, RemoteClients)
        self._first, plan = opening(
            algorithm, self.task, schedule, self.trainers, self._pools, remote
        )
        self._set_up(plan)
        engine.begin(self.task, None if directory is None else directory / "clients")
        self._accounts = Accounts(algorithm, directory, identity, remote)
        self._archive = Archive(directory, identity, engine, self._pools, observers)
        for observer in observers:
            observer.begin(self)
        self._resume()

    def _set_up(self, plan: Plan) -> None:
        """Set up the method for the plan of this run."""
        self.course = Course(self.algorithm)
        self.course.setup(plan)
        for part in self.pipeline.parts:
            part.require_resources()
        checked_model(self.pipeline, self.algorithm, self.task.initial, "setup")
        self._untrained = [
            *untrained(self.pipeline, list(pipelines(self.algorithm))),
            *clients_without_steps(self.task),
        ]
        awaited = self.schedule.participants(self.trainers)
        self._messenger = Messenger(
            self.task, self.engine, self.schedule, self.numbers, awaited, self._pools
        )

    @property
    def checkpoints(self) -> Checkpoints | None:
        """The checkpoints of the run, if it has a directory."""
        return self._archive.checkpoints

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the next round."""
        return self.course.at(self.finished + 1)

    def model(self) -> Tensor:
        """Return the global model, `[P]`."""
        return self.pipeline.model()

    def server_state(self) -> dict[str, Tensor]:
        """Return the server's state by path."""
        return self.course.state()

    @property
    def history(self) -> list[Record]:
        """The figures of each round. With a directory, each access reads the file."""
        return self._archive.lines("metrics.jsonl")

    @property
    def timings(self) -> list[Record]:
        """The times of each round."""
        return self._archive.lines("timings.jsonl")

    @property
    def client_history(self) -> list[Record]:
        """The figures by client, of the rounds that measured them."""
        return self._archive.lines("clients.jsonl")

    @property
    def notices(self) -> list[str]:
        """Warnings for the user, one line each.

        They concern the data, layers that are never trained, damaged checkpoints, the engine,
        diverging models of a pool, and the reason of an early end.
        """
        damaged = [] if self.checkpoints is None else self.checkpoints.notices
        early_end = list(self.evaluation.patience.notices)
        if self.finished and self.pipeline.spent:
            early_end.insert(
                0, f"the privacy budget is spent: the run ends after round {self.finished}"
            )
        pools, clients = self._pool_watch.notices, self.engine.notices
        return [*self.task.notices, *self._untrained, *damaged, *clients, *pools, *early_end]

    def run(self, on_round: Callable[[Record, Record], None] | None = None) -> None:
        """Run the remaining rounds.

        After an interruption (Ctrl-C) or an error, `run` saves a checkpoint of the last finished
        round. This is impossible if the interrupted round has changed too much client memory to
        undo it: the previous checkpoint then remains the newest.

        Args:
            on_round: Called after each round with its figures and its times.

        Raises:
            CheckpointError: If an earlier call was interrupted in a round that cannot be undone.
        """
        if self._midway:
            remedy = "create a new federation to continue from the newest checkpoint"
            raise CheckpointError(f"a round was interrupted and cannot be undone: {remedy}")
        if self.finished == 0 and self.pipeline.spent:
            self._accounts.require_budget()
        with sigterm_interrupts():
            try:
                while self.finished < self.schedule.rounds:
                    if self.pipeline.spent or self.evaluation.patience.round:
                        break
                    lines = self.step()
                    self._save_if_due(on_round, lines)
            finally:
                if self._saved < self.finished and not self._midway:
                    self.save()

    def _save_if_due(
        self, on_round: Callable[[Record, Record], None] | None, lines: tuple[Record, Record]
    ) -> None:
        if self.pipeline.releases_once or self._pools.holds(self.course.state().values()):
            self.save()
        if on_round is not None:
            on_round(*lines)
        due = self.finished % self.schedule.checkpoint_every == 0
        if due or self.finished == self.schedule.rounds:
            self.save()

    def step(self) -> tuple[Record, Record]:
        """Run one round. If it fails, restore the state before the round.

        Returns:
            Figures and times of the round.

        Raises:
            Diverged: If no client's model is finite, or the global model diverges.
        """
        self._midway = True
        state, integers = self.course.state(), self.integers
        succeeded = False
        try:
            lines = self._round(self.task.training.round_at(self._first, self.finished + 1))
            with uninterrupted():
                succeeded = True
                self._record(*lines)
                self.engine.commit()
                self._midway = False
        except BaseException:
            if not succeeded:
                self.course.restore(state)
                self._accounts.count()
                self.integers = integers
                self._midway = not self.engine.rollback()
            raise
        return lines[:2]

    def _round(self, round: Round) -> Lines:
        """Run the phases of a round, without writing its lines."""
        times = {"began": time.perf_counter()}
        pipeline = self.course.at(round.number)
        round = replace(round, closes=self.schedule.clock.closes(self._now))
        polled = self._messenger.poll(pipeline, round)
        selection = pipeline.select(round)
        exchange = pipeline.open(replace(round, selected=selection.clients), selection)
        require_message(exchange, pipeline.algorithm)
        delivery = self._messenger.address(pipeline, exchange, self.integers, self._now)
        self._accounts.record(exchange)
        engine = self.engine
        under_way = engine.under_way if isinstance(engine, RemoteClients) else frozenset()
        answers = self._messenger.deliver(pipeline, delivery, bool(self.observers))
        times["trained"] = time.perf_counter()
        outcome = self._outcome(delivery, answers)
        times["observed"] = time.perf_counter()
        model = self._close(pipeline, delivery, answers, outcome)
        times["received"] = time.perf_counter()
        reported = pipeline.report()
        record = round_record(delivery, answers, polled, reported, self.numbers, under_way)
        clients = self._evaluate(delivery.exchange.round, record, model)
        return record, timing(round.number, times, bool(self.observers)), clients

    def _outcome(self, delivery: Delivery, answers: RoundReplies) -> Replies | Aggregate | None:
        """Return the replies after the observers have read them, or the aggregate if folded."""
        if answers.fold is not None:
            return answers.aggregate
        replies = answers.all_replies()
        for observer in self.observers:
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
        self._accounts.count()
        self.course.next(exchange.round.number)
        upcoming = self.course.at(exchange.round.number + 1)
        return checked_model(upcoming, self.algorithm, self.task.initial)

    def _evaluate(self, round: Round, record: Record, model: Tensor) -> Record | None:
        """Evaluate the models and add their figures to `record`. Return the figures by client."""
        upcoming = self.course.at(round.number + 1)
        figures, clients = self.evaluation.measure(
            upcoming, round, model, self.integers, upcoming.spent
        )
        require_converging(self.task, round, model, figures.get("loss"))
        record |= figures
        for name, value in record.items():
            record[name] = finite(value)
        self._pool_watch.update(record)
        return clients

    def _record(self, record: Record, timing: Record, clients: Record | None) -> None:
        """Write the lines of a successful round."""
        self.finished, self._now = record["round"], record.get("simulated_seconds", 0.0)
        for observer in self.observers:
            observer.commit(record["round"])
        self.evaluation.patience.update(record["round"], record)
        if notices := [text for text in self.notices if text not in self._reported]:
            timing["notices"] = notices
            self._reported.update(notices)
        self._archive.append(record, timing, clients)

    def personal_tasks(self) -> Iterator[tuple[int, Round, Job]]:
        """Yield the personalisation job of each evaluated client.

        Yields:
            The user's number of the client, the next round, and the job.
        """
        evaluation, pipeline = self.evaluation, self.pipeline
        upcoming = self.task.training.round_at(self._first, self.finished + 1)
        clients = (*evaluation.clients, *evaluation.newcomers)
        for jobs in evaluation.deployed(pipeline, upcoming, clients, self.integers):
            yield from ((self.numbers[job.client], upcoming, job) for job in jobs)

    def save(self) -> None:
        """Write a checkpoint, then remove the files that only older checkpoints needed."""
        self._archive.save(self.finished, {**self.course.state(), INTEGERS: self.integers})
        self._saved = self.finished

    def _resume(self) -> None:
        """Continue from the newest valid checkpoint."""
        resumed = self._archive.resume(self._accounts)
        if resumed is None:
            return
        self.finished = self._saved = resumed.finished
        if resumed.history:
            self._now = resumed.history[-1].get("simulated_seconds", 0.0)
        for line in resumed.timings:
            self._reported.update(line.get("notices", ()))
        for record in resumed.history:
            self._pool_watch.update(record)
            self.evaluation.patience.update(record["round"], record)
        if resumed.state is not None:
            like = {**self.course.state(), INTEGERS: self.integers}
            server = moved_back(resumed.state, like, self.task.initial.device)
            self.integers = server.pop(INTEGERS)
            self.course.require_state(server)
            self.course.restore(server)
        self._accounts.count()
