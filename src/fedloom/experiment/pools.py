"""Where runs are made: in this process, in worker processes or in Ray actors, several at a time."""

from __future__ import annotations

import dataclasses
import multiprocessing
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from fedloom.engines.dispatch import WorkerDied
from fedloom.engines.ray.driver import ending
from fedloom.engines.ray.session import DIED, LOCAL, Session, has_room, join, leave, load_ray
from fedloom.engines.work import using_threads
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.cores import threads_each
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.jobs import Job, Tasks, attempt
from fedloom.experiment.run_process import STOP, RunActor, serve

LOOK_SECONDS = 0.2
"""Time between two checks whether the runs should stop."""

ACTOR_SECONDS = 0.5
"""Time between two requests for an actor's events."""

SAVING_SECONDS = 5.0
"""Time for a run to save what it has when it must end."""

STORE = 128 * 1024**2
"""Bytes for objects on a Ray cluster that is started here: jobs and events are small."""


class RunPool(ABC):
    """A place to make runs."""

    @abstractmethod
    def run(self, jobs: Sequence[Job], watch: Watch, fresh: bool, stopped: Callable[[], bool]) -> dict[RunName, str]:
        """Make the runs; returns the reason of each that failed. A failed run does not stop the others.

        When `stopped` returns true, every run in progress finishes its round and `KeyboardInterrupt` is raised.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the pool holds."""


class SerialPool(RunPool):
    """Makes one run after the other in this process."""

    def __init__(self, tasks: Tasks | None = None, threads: int | None = None) -> None:
        self.tasks, self.threads = tasks or Tasks(), threads

    def run(self, jobs: Sequence[Job], watch: Watch, fresh: bool, stopped: Callable[[], bool]) -> dict[RunName, str]:
        def watching(event: Event) -> None:
            watch(event)
            if stopped():
                raise KeyboardInterrupt

        with using_threads(self.threads):
            reasons = {job.name: attempt(job, watching, fresh, self.tasks) for job in jobs}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def close(self) -> None:
        """Nothing is held."""


class _RunWorker(ABC):
    """The pool's side of a process or an actor that makes one run at a time."""

    @abstractmethod
    def make(self, job: Job, fresh: bool, watch: Watch) -> str | None:
        """Make a run; returns why it failed, or None (also when it was stopped). Raises `WorkerDied`."""

    @abstractmethod
    def stop(self) -> None:
        """End the run after the round in progress."""

    @abstractmethod
    def end(self, busy: bool) -> None:
        """End it; if busy, at once."""


class _WorkerPool(RunPool):
    """At most `size` workers, each with a thread of this process that waits for it.

    They start when there is work and stay until the pool is closed. If one dies, only its run fails.
    """

    def __init__(self, size: int, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(size)
        self._lock = threading.Lock()
        self._idle: list[_RunWorker] = []
        self._busy: list[_RunWorker] = []
        self._stopping = False

    @abstractmethod
    def _start(self) -> _RunWorker:
        """Start a worker."""

    def run(self, jobs: Sequence[Job], watch: Watch, fresh: bool, stopped: Callable[[], bool]) -> dict[RunName, str]:
        news: SimpleQueue[Event | Future[str | None]] = SimpleQueue()
        self._stopping = False
        futures = {self._executor.submit(self._make, job, fresh, news.put): job.name for job in jobs}
        for future in futures:
            future.add_done_callback(news.put)
        running = set(futures)
        while running:
            with suppress(Empty):
                item = news.get(timeout=LOOK_SECONDS)
                running.discard(item) if isinstance(item, Future) else watch(item)
            if not self._stopping and stopped():
                with self._lock:
                    self._stopping = True
                    for worker in self._busy:
                        worker.stop()
        if self._stopping:
            raise KeyboardInterrupt
        results = {name: future.result() for future, name in futures.items()}
        return {name: reason for name, reason in results.items() if reason is not None}

    def close(self) -> None:
        with self._lock:
            self._stopping = True
            with ThreadPoolExecutor(1 + len(self._busy)) as ending:
                for worker in self._busy:
                    ending.submit(worker.end, True)
        self._executor.shutdown(cancel_futures=True)
        for worker in self._idle:
            worker.end(busy=False)
        self._idle.clear()

    def _make(self, job: Job, fresh: bool, watch: Watch) -> str | None:
        """Make one run, in a thread of its own."""
        with self._lock:
            if self._stopping:
                return None
            worker = self._idle.pop() if self._idle else self._start()
            self._busy.append(worker)
        try:
            reason = worker.make(job, fresh, watch)
        except WorkerDied as death:
            with self._lock:
                self._busy.remove(worker)
            watch(Event("failed", job.name, text=str(death)))
            return str(death)
        with self._lock:
            self._busy.remove(worker)
            self._idle.append(worker)
        return reason


class ProcessPool(_WorkerPool):
    """Worker processes with `threads` threads each."""

    def _start(self) -> _RunWorker:
        return _RunProcess(self.threads)


class _RunProcess(_RunWorker):
    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, threads), daemon=True)
        self.process.start()
        theirs.close()

    def make(self, job: Job, fresh: bool, watch: Watch) -> str | None:
        try:
            self.connection.send((job, fresh))
            while isinstance(said := self.connection.recv(), Event):
                watch(said)
        except (EOFError, OSError):
            self.process.join()
            raise WorkerDied(f"its worker process died (exit code {self.process.exitcode})") from None
        reason: str | None = said
        return reason

    def stop(self) -> None:
        with suppress(OSError):
            self.connection.send(STOP)

    def end(self, busy: bool) -> None:
        if busy:
            self.process.terminate()  # which lets it save
            self.process.join(SAVING_SECONDS)
            self.process.kill()
        else:
            self.connection.close()
        self.process.join()


class RayPool(_WorkerPool):
    """Ray actors with `threads` cores and threads each, on the cluster at `address` (see `fedloom.engines.ray.session.join`) or
    on one of this machine that is started here.

    An actor writes its run's files, so all nodes must share the file system that holds the runs. Raises as `join`.
    """

    def __init__(self, size: int, threads: int, address: str = LOCAL) -> None:
        super().__init__(size, threads)
        self.ray = load_ray()
        self.session = join(address, size * self.threads, 0, STORE)

    def _start(self) -> _RunWorker:
        return _RunActorHandle(self.ray, self.session, self.threads)

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        super().close()
        leave(self.session)


class _RunActorHandle(_RunWorker):
    def __init__(self, ray: Any, session: Session, threads: int) -> None:
        self.ray, self.session, self.threads = ray, session, threads
        self.call: Any = None
        self.actor = ray.remote(RunActor).options(num_cpus=threads, max_concurrency=2).remote(threads)
        self.there = self.actor.heard.remote()
        self.stopping = False

    def make(self, job: Job, fresh: bool, watch: Watch) -> str | None:
        """Paths are made absolute, since an actor works in a folder of its own."""
        folder = str(job.configuration.folder.resolve())
        configuration = dataclasses.replace(job.configuration, directory=folder)
        whole = dataclasses.replace(job, configuration=configuration, path=job.path.resolve())
        try:
            while not self._done(self.there):
                if self.stopping:
                    return None
                if not has_room(self.ray, self.threads, 0):
                    self.end(busy=True)
                    raise WorkerDied(f"no node of the Ray cluster has {self.threads} CPU for it")
            call = self.call = self.actor.make.remote(whole, fresh)
            done = False
            while not done:
                done = self._done(call)
                for event in self.ray.get(self.actor.heard.remote()):
                    watch(event)
            reason: str | None = self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            raise WorkerDied(DIED if self.session.died else f"its actor died: {ending(error)}") from None
        return reason

    def _done(self, call: Any) -> bool:
        """Whether a call has been answered, after a while. Raises `WorkerDied` when the local cluster has."""
        done, _ = self.ray.wait([call], timeout=ACTOR_SECONDS)
        if not done and self.session.died:
            raise WorkerDied(DIED)
        return bool(done)

    def stop(self) -> None:
        self.stopping = True
        self.actor.stop.remote()

    def end(self, busy: bool) -> None:
        if busy and self.call is not None:
            self.stop()
            self.ray.wait([self.call], timeout=SAVING_SECONDS)
        self.ray.kill(self.actor)


def make_pool(configuration: Configuration, runs: int, waiting: int, tasks: Tasks) -> RunPool:
    """Where those of `runs` runs that are waiting go on: in this process, in worker processes where several may go on at a
    time, or in Ray actors. Raises `MissingExtra` without Ray."""
    size, threads = configuration.runs_at_a_time, threads_each(configuration, runs)
    if configuration.pool != "processes" and waiting > 0:
        return RayPool(size, threads, LOCAL if configuration.pool == "ray" else configuration.pool)
    if size > 1 and waiting > 1:
        return ProcessPool(min(size, waiting), threads)
    return SerialPool(tasks, threads)
