"""The loop of rounds: one method on one task in one engine, with logs and checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from fedloom.algorithm.method import Method
from fedloom.common.errors import CheckpointError
from fedloom.common.round import Round
from fedloom.common.termination import sigterm_interrupts, uninterrupted
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.archive import Archive
from fedloom.rounds.checkpoint import Checkpoints
from fedloom.rounds.engine import Engine, Job, RemoteClients
from fedloom.rounds.evaluation import Evaluation, Record, newcomers_last
from fedloom.rounds.observer import Observer
from fedloom.rounds.opening import opening
from fedloom.rounds.round_runner import RoundRunner
from fedloom.rounds.schedule import Schedule as Schedule
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task


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
        self.algorithm = algorithm
        self.engine = engine
        self.schedule = schedule
        self.observers = observers
        newcomers = schedule.newcomers(task.clients)
        self.task, self.numbers = newcomers_last(task, newcomers, schedule.seed)
        self.trainers = task.clients - newcomers
        self.evaluation = Evaluation(self.task, engine, schedule, self.trainers, self.numbers)
        self.finished = self._saved = 0  # rounds, now and at the last checkpoint
        self._reported: set[str] = set()  # notices that `timings.jsonl` already contains
        self._midway = False  # within a round, the state belongs to no finished round
        self._now = 0.0  # simulated time in seconds
        self._pools = PoolFiles(
            None if directory is None else directory / "pool", schedule.pool_budget
        )
        remote = isinstance(engine, RemoteClients)
        self._first, self.course, self._untrained = opening(
            algorithm, self.task, schedule, self.trainers, self._pools, remote
        )
        engine.begin(self.task, None if directory is None else directory / "clients")
        self._archive = Archive(algorithm, directory, identity, engine, self._pools, observers)
        self._rounds = RoundRunner(self.course, schedule, self.evaluation, self._archive)
        for observer in observers:
            observer.begin(self)
        self._resume()

    @property
    def checkpoints(self) -> Checkpoints | None:
        """The checkpoints of the run, if it has a directory."""
        return self._archive.checkpoints

    @property
    def integers(self) -> Tensor:
        """The integer buffers of the global model, `[Z]`."""
        return self._rounds.integers

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
    def client_metrics(self) -> list[Record]:
        """The clients' own figures of training, of the rounds in which a method has measured any.

        Each line has the `clients` and, by name, a list with a value for each (None: no value).
        """
        return self._archive.lines("client_metrics.jsonl")

    @property
    def notices(self) -> list[str]:
        """Warnings for the user, one line each.

        They concern the data, layers that are never trained, damaged checkpoints, the engine,
        clients that failed, diverging models of a pool, and the reason of an early end.
        """
        notices = [*self.task.notices, *self._untrained]
        if self.checkpoints is not None:
            notices += self.checkpoints.notices
        notices += [*self.engine.notices, *self._rounds.notices.values()]
        if self.finished and self.pipeline.spent:
            notices.append(f"the privacy budget is spent: the run ends after round {self.finished}")
        return [*notices, *self.evaluation.notices]

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
            self._archive.accounts.require_budget()
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
        state = self._rounds.state()
        succeeded = False
        try:
            upcoming = self.task.training.round_at(self._first, self.finished + 1)
            lines = self._rounds.run(upcoming, self._now)
            with uninterrupted():
                succeeded = True
                self._record(*lines)
                self.engine.commit()
                self._midway = False
        except BaseException:
            if not succeeded:
                self._rounds.restore(state)
                self._midway = not self.engine.rollback()
            raise
        return lines[:2]

    def _record(
        self, record: Record, timing: Record, clients: Record | None, metrics: Record | None
    ) -> None:
        """Write the lines of a successful round."""
        self.finished = record["round"]
        self._now = record.get("simulated_seconds", 0.0)
        for observer in self.observers:
            observer.commit(record["round"])
        self.evaluation.follow(record)
        if notices := [text for text in self.notices if text not in self._reported]:
            timing["notices"] = notices
            self._reported.update(notices)
        self._archive.append(record, timing, clients, metrics)

    def personal_tasks(self) -> Iterator[tuple[int, Round, Job]]:
        """Yield the personalisation job of each evaluated client.

        Yields:
            The user's number of the client, the next round, and the job.
        """
        evaluation = self.evaluation
        pipeline = self.pipeline
        upcoming = self.task.training.round_at(self._first, self.finished + 1)
        clients = (*evaluation.clients, *evaluation.newcomers)
        for jobs in evaluation.deployed(pipeline, upcoming, clients, self.integers):
            yield from ((self.numbers[job.client], upcoming, job) for job in jobs)

    def save(self) -> None:
        """Write a checkpoint, then remove the files that only older checkpoints needed."""
        self._archive.save(self.finished, self._rounds.state())
        self._saved = self.finished

    def _resume(self) -> None:
        """Continue from the newest valid checkpoint."""
        resumed = self._archive.resume()
        if resumed is None:
            return
        self.finished = self._saved = resumed.finished
        if resumed.history:
            self._now = resumed.history[-1].get("simulated_seconds", 0.0)
        for line in resumed.timings:
            self._reported.update(line.get("notices", ()))
        for record in resumed.history:
            self.evaluation.follow(record)
        self._rounds.resume(resumed.state)
