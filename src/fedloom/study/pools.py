"""Pools of runs: in this process, or in worker processes or Ray tasks, several runs at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from subprocess import Popen, TimeoutExpired
from typing import Any, cast

import cloudpickle

from fedloom.engines.ray.driver import reason_of_death
from fedloom.engines.ray.session import DIED, LOCAL, has_room, join, leave, load_ray
from fedloom.engines.work import using_threads
from fedloom.engines.worker_life import STARTS_WORKERS, start_worker
from fedloom.runs.configuration import Configuration
from fedloom.runs.events import Event, RunName, Watch
from fedloom.study.cores import threads_each
from fedloom.study.jobs import RunJob, Tasks, attempt
from fedloom.study.run_process import EventBoard, make_in_ray

_PROGRAM = "from fedloom.study.run_process import main; main()"

POLL_SECONDS = 0.2
"""Time between two checks whether the runs should stop."""

SAVING_SECONDS = 5.0
"""Time for a run to save its state when it must end."""


class SerialPool:
    """Makes one run after another in this process."""

    def __init__(self, tasks: Tasks | None = None, threads: int | None = None) -> None:
        self.tasks, self.threads = tasks or Tasks(), threads

    def run(
        self, jobs: Sequence[RunJob], watch: Watch, fresh: bool, stopped: Callable[[], bool]
    ) -> dict[RunName, str]:
        """Make the runs. A failed run stops no other run.

        Args:
            jobs: The runs to make.
            watch: Called with every event.
            fresh: Start the runs again.
            stopped: Checked after every event. If it returns True, every run in progress finishes
                its round.

        Returns:
            The reason of each failed run.

        Raises:
            KeyboardInterrupt: `stopped` returned True.
        """

        def watch_or_stop(event: Event) -> None:
            watch(event)
            if stopped():
                raise KeyboardInterrupt

        reasons = {}
        with using_threads(self.threads):
            for job in jobs:
                if (reason := attempt(job, watch_or_stop, fresh, self.tasks)) is not None:
                    reasons[job.name] = reason
                    watch(Event("failed", job.name, text=reason))
        return reasons

    def close(self) -> None: ...


class ProcessPool:
    """Makes `size` runs at a time in worker processes of `threads` threads each. If a worker dies,
    only its run fails.
    """

    def __init__(self, size: int, threads: int) -> None:
        self.size, self.threads, self.stopping = size, threads, False
        self.processes: dict[Connection, Popen[bytes]] = {}
        self.busy: dict[Any, RunName] = {}

    def run(
        self, jobs: Sequence[RunJob], watch: Watch, fresh: bool, stopped: Callable[[], bool]
    ) -> dict[RunName, str]:
        """Make the runs, `size` at a time.

        Args:
            jobs: As in `SerialPool.run`.
            watch: As in `SerialPool.run`. It is called in this process.
            fresh: As in `SerialPool.run`.
            stopped: As in `SerialPool.run`, but checked at least every `POLL_SECONDS`.

        Returns:
            The reason of each failed run, in the order of the jobs.

        Raises:
            KeyboardInterrupt: `stopped` returned True.
        """
        waiting, reasons = list(jobs), {}
        while waiting or self.busy:
            while waiting and len(self.busy) < self.size:
                self._begin(waiting.pop(0), fresh)
            for worker, message in self._messages():
                if isinstance(message, Event):
                    watch(message)
                elif (name := self.busy.pop(worker)) and message is not None:
                    reasons[name] = message
                    watch(Event("failed", name, text=message))
            if stopped() and not self.stopping:
                self.stopping = True
                waiting.clear()
                self._stop()
        if self.stopping:
            raise KeyboardInterrupt
        return {job.name: reasons[job.name] for job in jobs if job.name in reasons}

    def _begin(self, job: RunJob, fresh: bool) -> None:
        # all at once, since each takes seconds to import PyTorch
        while len(self.processes) < self.size:
            self.start()
        connection = next(line for line in self.processes if line not in self.busy)
        self.busy[connection] = job.name
        # cloudpickle also takes classes of a notebook
        self._send(connection, cloudpickle.dumps((job, fresh)))

    def start(self) -> None:
        """Start a worker process."""
        process, connection = start_worker(_PROGRAM, self.threads)
        self.processes[connection] = process

    def _stop(self) -> None:
        """End the runs in progress after their rounds."""
        for connection in self.busy:
            self._send(connection, b"")

    def _send(self, connection: Connection, message: bytes) -> None:
        with suppress(OSError):  # of a dead process, which `_messages` notices
            connection.send_bytes(message)

    def _messages(self) -> Iterator[tuple[Any, Event | str | None]]:
        """Wait a little; yield events, and for each run that has ended its key in `busy` and why it
        failed, or None.
        """
        for connection in cast(list[Connection], wait(list(self.busy), POLL_SECONDS)):
            try:
                yield connection, connection.recv()
            except (EOFError, OSError):
                code = self.processes.pop(connection).wait()
                yield connection, f"its worker process died (exit code {code})"

    def close(self) -> None:
        """End all workers; those that are busy save their runs."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with suppress(TimeoutExpired):
                process.wait(SAVING_SECONDS)
            process.kill()
            process.wait()


class RayPool(ProcessPool):
    """Makes runs in processes of a Ray cluster. All nodes must share the folder of the runs."""

    def __init__(self, address: str, size: int, threads: int) -> None:
        super().__init__(size, threads)
        self.ray = load_ray()
        # bytes: jobs and events are small
        self.session = join(address, size * threads, 0, 128 << 20)
        self.board = self.ray.remote(EventBoard).options(num_cpus=0).remote()
        self.make = self.ray.remote(num_cpus=threads, max_retries=0, max_calls=1)(make_in_ray)

    def _begin(self, job: RunJob, fresh: bool) -> None:
        # a task has its own working folder
        directory = str(job.configuration.folder.resolve())
        configuration = replace(job.configuration, directory=directory)
        job = replace(job, configuration=configuration, path=job.path.resolve())
        self.busy[self.make.remote(job, fresh, self.threads, self.board)] = job.name

    def _stop(self) -> None: ...  # the board stops them

    def _messages(self) -> Iterator[tuple[Any, Event | str | None]]:
        ended, others = self.ray.wait(list(self.busy), timeout=POLL_SECONDS)
        lost = ""
        if self.session.died:
            lost = DIED
        elif not has_room(self.ray, self.threads, 0):
            lost = f"no node of the Ray cluster has {self.threads} CPU for it"
        if lost:
            ended += others
        else:
            # then the runs on the board's node are lost too, with an error
            with suppress(self.ray.exceptions.RayError):
                yield from self.ray.get(self.board.get.remote(self.stopping))
        for call in ended:
            try:
                yield call, lost or self.ray.get(call)
            except self.ray.exceptions.RayError as error:
                yield (
                    call,
                    DIED if self.session.died else f"its worker died: {reason_of_death(error)}",
                )

    def close(self) -> None:
        self.ray.wait(
            [self.board.get.remote(True), *self.busy],
            num_returns=1 + len(self.busy),
            timeout=SAVING_SECONDS,
        )
        for call in self.busy:
            self.ray.cancel(call, force=True)
        self.ray.kill(self.board)
        leave(self.session)


RunPool = SerialPool | ProcessPool


def make_pool(configuration: Configuration, runs: int, waiting: int, tasks: Tasks) -> RunPool:
    """Return the pool for runs. Raises as `load_ray` and `join`.

    Args:
        configuration: The configuration.
        runs: Number of all runs.
        waiting: Number of runs that are not finished.
        tasks: Cache of tasks in this process.

    Returns:
        A pool for at most `waiting` runs at a time.
    """
    size, threads = min(configuration.runs_at_a_time, waiting), threads_each(configuration, runs)
    if configuration.pool != "processes" and size:
        return RayPool(LOCAL if configuration.pool == "ray" else configuration.pool, size, threads)
    spreads = size > 1 and STARTS_WORKERS
    return ProcessPool(size, threads) if spreads else SerialPool(tasks, threads)
