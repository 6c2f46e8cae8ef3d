"""Pools of runs: in this process, in worker processes or in Ray tasks, several runs at a time."""

import dataclasses
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Any

import cloudpickle

from fedloom.engines.ray.driver import ending
from fedloom.engines.ray.session import DIED, LOCAL, has_room, join, leave, load_ray
from fedloom.engines.work import using_threads
from fedloom.errors import InvalidValue
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.cores import threads_each
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.jobs import Job, Tasks, attempt
from fedloom.experiment.run_process import EventBoard, make_in_ray, serve

POLL_SECONDS = 0.2
"""Time between two checks whether the runs should stop."""

SAVING_SECONDS = 5.0
"""Time for a run to save its state when it must end."""

STORE = 128 * 1024**2
"""Bytes for objects on a Ray cluster that is started here: jobs and events are small."""

News = Event | tuple[RunName, str | None]
"""An event of a run, or that a run has ended, with the reason if it failed."""


class SerialPool:
    """Makes one run after another in this process."""

    def __init__(self, tasks: Tasks | None = None, threads: int | None = None) -> None:
        self.tasks, self.threads = tasks or Tasks(), threads

    def run(self, jobs: Sequence[Job], watch: Watch, fresh: bool, stopped: Callable[[], bool]) -> dict[RunName, str]:
        """Make the runs and return the reason of each that failed, which stops no other.

        When `stopped` returns True, every run in progress finishes its round and `KeyboardInterrupt` is raised.
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

    def close(self) -> None:
        """Do nothing."""


class ParallelPool:
    """Base of pools with `size` runs at a time, of `threads` threads each. If a worker dies, only its run fails."""

    def __init__(self, size: int, threads: int) -> None:
        self.size, self.threads = size, threads

    def run(self, jobs: Sequence[Job], watch: Watch, fresh: bool, stopped: Callable[[], bool]) -> dict[RunName, str]:
        """Make the runs; see `SerialPool.run`."""
        waiting, running, stopping = list(jobs), set[RunName](), False
        reasons = {}
        while waiting or running:
            while waiting and len(running) < self.size:
                job = waiting.pop(0)
                running.add(job.name)
                self.begin(job, fresh)
            for news in self.news():
                if isinstance(news, Event):
                    watch(news)
                    continue
                name, reason = news
                running.remove(name)
                if reason is not None:
                    reasons[name] = reason
                    watch(Event("failed", name, text=reason))
            if not stopping and stopped():
                stopping = True
                waiting.clear()
                self.stop()
        if stopping:
            raise KeyboardInterrupt
        return {job.name: reasons[job.name] for job in jobs if job.name in reasons}

    def begin(self, job: Job, fresh: bool) -> None:
        raise NotImplementedError

    def news(self) -> Iterator[News]:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End all workers; those that are busy save their runs."""
        raise NotImplementedError


class ProcessPool(ParallelPool):
    """Makes runs in worker processes."""

    def __init__(self, size: int, threads: int) -> None:
        super().__init__(size, threads)
        self.context = multiprocessing.get_context("spawn")
        self.stopping = self.context.RawValue("b", False)
        self.processes: dict[Connection, SpawnProcess] = {}
        self.busy: dict[Connection, RunName] = {}

    def begin(self, job: Job, fresh: bool) -> None:
        while len(self.processes) < self.size:  # all at once, since each takes seconds to import PyTorch
            self.start()
        connection = next(connection for connection in self.processes if connection not in self.busy)
        self.busy[connection] = job.name
        with suppress(OSError):  # of a dead process, which `news` notices
            connection.send_bytes(cloudpickle.dumps((job, fresh)))  # with classes of a notebook

    def start(self) -> None:
        connection, remote = self.context.Pipe()
        process = self.context.Process(target=serve, args=(remote, self.stopping, self.threads), daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # a script would run again: its classes come with the jobs
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
        remote.close()
        self.processes[connection] = process

    def news(self) -> Iterator[News]:
        for connection in wait(list(self.busy), POLL_SECONDS):
            assert isinstance(connection, Connection)
            try:
                message = connection.recv()
            except (EOFError, OSError):
                process = self.processes.pop(connection)
                process.join()
                message = f"its worker process died (exit code {process.exitcode})"
            yield message if isinstance(message, Event) else (self.busy.pop(connection), message)

    def stop(self) -> None:
        self.stopping.value = True

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join(SAVING_SECONDS)
            process.kill()
            process.join()


class RayPool(ParallelPool):
    """Makes runs in tasks of a Ray cluster. They write their runs' files: all nodes must share the file system."""

    def __init__(self, address: str, size: int, threads: int) -> None:
        super().__init__(size, threads)
        self.ray = load_ray()
        self.session = join(address, size * threads, 0, STORE)
        self.board = self.ray.remote(EventBoard).options(num_cpus=0).remote()
        self.make = self.ray.remote(make_in_ray).options(num_cpus=threads, max_retries=0)
        self.calls: dict[Any, RunName] = {}

    def begin(self, job: Job, fresh: bool) -> None:
        if not has_room(self.ray, self.threads, 0):
            raise InvalidValue(f"no node of the Ray cluster has {self.threads} CPU for a run")
        folder = str(job.configuration.folder.resolve())  # a worker has a working folder of its own
        configuration = dataclasses.replace(job.configuration, directory=folder)
        job = dataclasses.replace(job, configuration=configuration, path=job.path.resolve())
        self.calls[self.make.remote(job, fresh, self.threads, self.board)] = job.name

    def news(self) -> Iterator[News]:
        ended, _ = self.ray.wait(list(self.calls), timeout=POLL_SECONDS)
        died, lost = self.session.died, self.ray.exceptions.RayError
        with suppress(lost):  # then the runs that were on its node are lost too, and say so
            yield from () if died else self.ray.get(self.board.take.remote())
        for call in list(self.calls) if died else ended:
            try:
                reason = DIED if died else self.ray.get(call)
            except lost as error:
                reason = DIED if self.session.died else f"its worker died: {ending(error)}"
            yield self.calls.pop(call), reason

    def stop(self) -> None:
        self.board.stop.remote()

    def close(self) -> None:
        for call in self.calls:
            self.ray.cancel(call)
        if self.calls and not self.session.died:
            self.ray.wait(list(self.calls), num_returns=len(self.calls), timeout=SAVING_SECONDS)
        for call in self.calls:
            self.ray.cancel(call, force=True)
        self.ray.kill(self.board)
        leave(self.session)


RunPool = SerialPool | ParallelPool


def make_pool(configuration: Configuration, runs: int, waiting: int, tasks: Tasks) -> RunPool:
    """Return the pool for those of `runs` runs that are waiting. Raises as `load_ray` and `join`."""
    size, threads = configuration.runs_at_a_time, threads_each(configuration, runs)
    if configuration.pool != "processes" and waiting > 0:
        return RayPool(LOCAL if configuration.pool == "ray" else configuration.pool, size, threads)
    if size > 1 and waiting > 1:
        return ProcessPool(min(size, waiting), threads)
    return SerialPool(tasks, threads)
