"""A federation: one method on one task in one engine, round after round, with checkpoints."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedloom.errors import CheckpointError, InvalidValue
from fedloom.flat.device import moved_back
from fedloom.method import Method
from fedloom.parts.course import Course, pipelines
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.requirements import require_participation
from fedloom.records import INTEGERS, Aggregate, Plan, Replies
from fedloom.round import Round
from fedloom.rounds.accounts import Accounts
from fedloom.rounds.checkpoint import Checkpoint, Checkpoints, RoundLog
from fedloom.rounds.checks import checked_model, require_converging, require_message
from fedloom.rounds.delivery import Delivery, Post
from fedloom.rounds.engine import Engine, Job, RemoteClients
from fedloom.rounds.evaluation import (
    Evaluation,
    Record,
    clients_without_steps,
    newcomers_last,
    untrained,
)
from fedloom.rounds.pool_watch import PoolWatch
from fedloom.rounds.replies import RoundReplies
from fedloom.rounds.round_record import finite, round_record, timing
from fedloom.rounds.schedule import Schedule as Schedule
from fedloom.rounds.termination import sigterm_interrupts, uninterrupted
from fedloom.state.files import remove_unfinished
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task

LOGS = {
    "metrics.jsonl": (),
    "timings.jsonl": ("ended", "seconds", "train_seconds"),
    "clients.jsonl": (),
}
"""Files of a run with one line for each round, and the names that every line has."""

Lines = tuple[Record, Record, Record | None]
"""Figures of a round, its times, and figures by client if they were measured."""


class Observer(Protocol):
    """Records something of the rounds of a federation, without influence on them.

    `begin` is called when the federation is set up, before it resumes; `observe` before the method
    receives the replies, in a round that may still fail; `commit` when it has succeeded. `log` is
    cut where a run resumes, and checkpoints contain its digest.
    """

    @property
    def log(self) -> RoundLog: ...
    def begin(self, federation: "Federation") -> None: ...
    def observe(self, round: Round, jobs: Sequence[Job], replies: Replies) -> None: ...
    def commit(self, number: int) -> None: ...


class Federation:
    """One method on one task in one engine, round after round.

    With a `directory`, each round appends its figures to `metrics.jsonl`, those of single clients
    to `clients.jsonl`, and its times and new notices to `timings.jsonl`. Checkpoints are saved
    there, client memory that does not fit into them under `clients`, and pools larger than the
    schedule's `pool_budget` under `pool`; a run with such a pool has a checkpoint of every round. A
    federation made again with the same arguments continues from the newest checkpoint of the same
    `identity`.

    Figures name clients by the task's numbers. Where some never train (`Schedule.new_clients`),
    `self.task` has these last, and methods and engine use the numbers of that order.
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
        self.finished = self._saved = 0  # rounds so far, and at the last checkpoint
        self._pool_watch = PoolWatch(task.test.labels, schedule.rounds)
        self._noted: set[str] = set()  # notices that were written to `timings`
        self._midway = False  # a round has begun and not ended, so the state belongs to no round
        self._now = 0.0  # simulated time
        self._pools = PoolFiles(
            None if directory is None else directory / "pool", schedule.pool_budget
        )
        self._set_up(task)
        remote = isinstance(engine, RemoteClients)
        engine.begin(self.task, None if directory is None else directory / "clients")
        self.checkpoints = None if directory is None else Checkpoints(directory, identity)
        self._accounts = Accounts(algorithm, directory, identity, remote)
        paths = {name: None if directory is None else directory / name for name in LOGS}
        self._logs = [RoundLog(paths[name], names) for name, names in LOGS.items()]
        for observer in observers:
            observer.begin(self)
        self._resume()

    def _set_up(self, task: Task) -> None:
        """Set up the method for the plan of this run."""
        schedule, remote = self.schedule, isinstance(self.engine, RemoteClients)
        if schedule.clock.runs and remote:
            reason = "the time of real sites is that of the real clock: leave the table [clock] out"
            raise InvalidValue(f"clock: {reason}")
        task.training.same_rates(schedule.rounds, schedule.rounds)  # raises where there is none
        awaited = schedule.participants(self.trainers)  # replies of a round, at most
        participants = schedule.clock.selected(awaited, self.trainers)
        poisson = schedule.participation_mode == "poisson"
        require_participation(self.algorithm, poisson, participants > awaited)
        rate = task.training.rate(1, schedule.rounds)
        self._first = Round(
            number=1,
            rounds=schedule.rounds,
            seed=schedule.seed,
            clients=self.trainers,
            participants=participants,
            learning_rate=rate,
            initial_learning_rate=rate,
            poisson=poisson,
        )
        plan = Plan(
            layout=task.layout,
            initial=task.initial,
            clients=self.trainers,
            participants=participants,
            rounds=schedule.rounds,
            seed=schedule.seed,
            classes=task.dataset.classes,
            sizes=self.task.sizes,
            module=task.model,
            remote=remote,
            poisson=poisson,
            pools=self._pools,
            training=task.training,
            awaited=min(awaited, participants),
        )
        self.course = Course(self.algorithm)
        self.course.setup(plan)
        for part in self.pipeline.parts:
            part.require_resources()
        checked_model(self.pipeline, self.algorithm, task.initial, "setup")
        self._untrained = [
            *untrained(self.pipeline, list(pipelines(self.algorithm))),
            *clients_without_steps(task),
        ]
        self._post = Post(self.task, self.engine, schedule, self.numbers, awaited, self._pools)

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
        """The figures of each round, read anew where there is a directory."""
        return self._logs[0].read()

    @property
    def timings(self) -> list[Record]:
        """The times of each round."""
        return self._logs[1].read()

    @property
    def client_history(self) -> list[Record]:
        """The figures client by client, of the rounds in which they were taken."""
        return self._logs[2].read()

    @property
    def notices(self) -> list[str]:
        """Notices, one line each: damaged checkpoints, how clients train where that is unusual,
        whether the models of a pool drift apart, and why the run ends early.
        """
        damaged = [] if self.checkpoints is None else self.checkpoints.notices
        ends = self.evaluation.patience.notices
        if self.finished and self.pipeline.spent:
            ends = [f"the privacy budget is spent: the run ends after round {self.finished}", *ends]
        pools, clients = self._pool_watch.notices, self.engine.notices
        return [*self.task.notices, *self._untrained, *damaged, *clients, *pools, *ends]

    def run(self, on_round: Callable[[Record, Record], None] | None = None) -> None:
        """Run the remaining rounds.

        An interruption (Ctrl-C) or an error leaves a checkpoint of the last finished round. Where
        the interrupted round has changed too much client memory to be undone, the checkpoint before
        stays the last, and `run` raises `CheckpointError`.

        Args:
            on_round: Called after each round with its figures and its times.
        """
        if self._midway:
            remedy = "make the federation again to continue from a checkpoint"
            raise CheckpointError(f"a round was interrupted: {remedy}")
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
        """Run a round: all of it or nothing.

        Returns:
            Its figures and its times.

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
        """Return the figures of a new round, its times, and the figures by client if measured."""
        times = {"began": time.perf_counter()}
        pipeline = self.course.at(round.number)
        round = replace(round, closes=self.schedule.clock.closes(self._now))
        polled = self._post.poll(pipeline, round)
        selection = pipeline.select(round)
        exchange = pipeline.open(replace(round, selected=selection.clients), selection)
        require_message(exchange, pipeline.algorithm)
        delivery = self._post.address(pipeline, exchange, self.integers, self._now)
        self._accounts.note(exchange)
        engine = self.engine
        under_way = engine.under_way if isinstance(engine, RemoteClients) else frozenset()
        answers = self._post.deliver(pipeline, delivery, bool(self.observers))
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
        """Return the replies after the observers have read them, or the aggregate of folded ones."""
        if answers.fold is not None:
            return answers.aggregate
        replies = answers.together()
        for observer in self.observers:
            observer.observe(delivery.exchange.round, delivery.jobs, replies)
        replies.integers = replies.matrices.pop(INTEGERS, None)
        if replies.integers is not None:
            silent = torch.ones(len(replies.integers), dtype=torch.bool)
            silent[replies.index] = False
            replies.integers[silent] = self.integers.to(replies.integers.device)
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
        """Make the server's step and begin the next stage, if any. Return the global model."""
        exchange = delivery.exchange
        if answers.integers is not None and len(answers.integers):
            self.integers = pipeline.merge_integers(answers.integers, self.integers)
        pipeline.close(exchange, outcome)
        pipeline.finish(exchange)
        self._accounts.count()
        self.course.next(exchange.round.number)
        present = self.course.at(exchange.round.number + 1)
        return checked_model(present, self.algorithm, self.task.initial)

    def _evaluate(self, round: Round, record: Record, model: Tensor) -> Record | None:
        """Evaluate the models and add the figures to the record. Return the figures by client."""
        upcoming = self.course.at(round.number + 1)
        figures, clients = self.evaluation.measure(
            upcoming, round, model, self.integers, upcoming.spent
        )
        require_converging(self.task, round, model, figures.get("loss"))
        record |= figures
        for name, value in record.items():
            record[name] = finite(value)
        self._pool_watch.see(record)
        return clients

    def _record(self, record: Record, timing: Record, clients: Record | None) -> None:
        """Write the lines of a round that has succeeded."""
        self.finished, self._now = record["round"], record.get("simulated_seconds", 0.0)
        for observer in self.observers:
            observer.commit(record["round"])
        self.evaluation.patience.see(record["round"], record)
        if notices := [text for text in self.notices if text not in self._noted]:
            timing["notices"] = notices
            self._noted.update(notices)
        for log, line in zip(self._logs, (record, timing, clients), strict=True):
            if line is not None:
                log.append(line)

    def personal_tasks(self) -> Iterator[tuple[int, Round, Job]]:
        """Yield what each evaluated client is sent to personalise, with its number and the next
        round.
        """
        evaluation, pipeline = self.evaluation, self.pipeline
        upcoming = self.task.training.round_at(self._first, self.finished + 1)
        clients = (*evaluation.clients, *evaluation.newcomers)
        for jobs in evaluation.deployed(pipeline, upcoming, clients, self.integers):
            yield from ((self.numbers[task.client], upcoming, task) for task in jobs)

    def save(self) -> None:
        """Write a checkpoint, after the figures and client memory that it refers to; then remove
        what only older ones needed.
        """
        if self.checkpoints is not None:
            logs = self._checked_logs()
            for log in logs:
                log.sync()
            state = {**self.course.state(), INTEGERS: self.integers}
            pools = {
                name: file
                for name, tensor in state.items()
                if (file := self._pools.write(tensor)) is not None
            }
            server = {name: tensor for name, tensor in state.items() if name not in pools}
            digests = {log.name: log.digest for log in logs}
            self.checkpoints.save(
                Checkpoint(self.finished, server, self.engine.memory(), digests, pools)
            )
            self._pools.keep(pools.values())
            self.engine.release_memory()
        self._saved = self.finished

    def _checked_logs(self) -> list[RoundLog]:
        """Return the logs of figures, which must be as a checkpoint knows them; times need not."""
        return [self._logs[0], self._logs[2], *(observer.log for observer in self.observers)]

    def _adopt(self, checkpoint: Checkpoint) -> None:
        for log in self._checked_logs():
            log.require(checkpoint.round, checkpoint.logs.get(log.name))
        written = {name: self._pools.read(file) for name, file in checkpoint.pools.items()}
        checkpoint.server.update(written)
        self.engine.restore_memory(checkpoint.clients)

    def _resume(self) -> None:
        """Continue from the newest checkpoint that can be read."""
        if self.checkpoints is None:
            return
        remove_unfinished(self.checkpoints.directory)
        logs = [self._logs[0], *(observer.log for observer in self.observers)]
        lines = [log.read() for log in logs]
        shown = [record["round"] for record in lines[0]]
        self._accounts.resume(max([0, *shown, *self.checkpoints.rounds()]))
        recorded = [log.complete(read) for log, read in zip(logs, lines, strict=True)]
        checkpoint = self.checkpoints.latest(min(recorded), self._adopt)
        finished = 0 if checkpoint is None else checkpoint.round
        self._resume_logs(finished)
        if checkpoint is not None:
            self._pools.keep(checkpoint.pools.values())
            like = {**self.course.state(), INTEGERS: self.integers}
            server = moved_back(checkpoint.server, like, self.task.initial.device)
            self.integers = server.pop(INTEGERS)
            self.course.require_state(server)
            self.course.restore(server)
        self._accounts.count()

    def _resume_logs(self, finished: int) -> None:
        history, timings, _ = [log.resume(finished) for log in self._logs]
        self.finished = self._saved = finished
        self._now = history[-1].get("simulated_seconds", 0.0) if history else 0.0
        for line in timings:
            self._noted.update(line.get("notices", ()))
        for record in history:
            self._pool_watch.see(record)
            self.evaluation.patience.see(record["round"], record)
        for observer in self.observers:
            observer.log.resume(finished)
