"""Pools of runs: in this process, in worker processes or in Ray actors, several runs at a time."""

import dataclasses
import multiprocessing
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any

import cloudpickle

from fedloom.engines.dispatch import WorkerDied
from fedloom.engines.ray.driver import ending
from fedloom.engines.ray.session import DIED, LOCAL, Session, has_room, join, leave, load_ray
from fedloom.engines.work import using_threads
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.cores import threads_each
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.jobs import Job, Tasks, attempt
from fedloom.experiment.run_process import STOP, RunActor, serve

POLL_SECONDS = 0.2
"""Time between two checks whether the runs should stop."""

ACTOR_SECONDS = 0.5
"""Time between two requests for an actor's events."""

SAVING_SECONDS = 5.0
"""Time for a run to save its state when it must end."""

STORE = 128 * 1024**2
"""Bytes for objects on a Ray cluster that is started here: jobs and events are small."""


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

        with using_threads(self.threads):
            reasons = {job.name: attempt(job, watch_or_stop, fresh, self.tasks) for job in jobs}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def close(self) -> None:
        """Do nothing."""


class WorkerPool:
    """At most `size` workers, each with a thread that waits for it. If a worker dies, only its run fails."""

    def __init__(
        self, size: int, start: "Callable[[], RunProcess | RunActorHandle]", release: Callable[[], None] = lambda: None
    ) -> None:
        self._start, self._release = start, release
        self._executor = ThreadPoolExecutor(size)
        self._lock = threading.Lock()
        self._idle: list[RunProcess | RunActorHandle] = []
        self._busy: list[RunProcess | RunActorHandle] = []
        self._stopping = False

    def run(self, jobs: Sequence[Job], watch: Watch, fresh: bool, stopped: Callable[[], bool]) -> dict[RunName, str]:
        """Make the runs; see `SerialPool.run`."""
        news: SimpleQueue[Event | Future[str | None]] = SimpleQueue()
        self._stopping = False
        futures = {self._executor.submit(self._make, job, fresh, news.put): job.name for job in jobs}
        for future in futures:
            future.add_done_callback(news.put)
        running = set(futures)
        while running:
            with suppress(Empty):
                item = news.get(timeout=POLL_SECONDS)
                running.discard(item) if isinstance(item, Future) else watch(item)
            if not self._stopping and stopped():
                with self._lock:
                    self._stopping = True
                    for worker in self._busy:
                        worker.stop()
        if self._stopping:
            raise KeyboardInterrupt
        reasons = {name: future.result() for future, name in futures.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def close(self) -> None:
        """End all workers, those that are busy at once."""
        with self._lock:
            self._stopping = True
            with ThreadPoolExecutor(1 + len(self._busy)) as executor:
                for worker in self._busy:
                    executor.submit(worker.end, True)
        self._executor.shutdown(cancel_futures=True)
        for worker in self._idle:
            worker.end(busy=False)
        self._idle.clear()
        self._release()

    def _make(self, job: Job, fresh: bool, watch: Watch) -> str | None:
        """Make one run, in a thread."""
        with self._lock:
            if self._stopping:
                return None
            worker = self._idle.pop() if self._idle else self._start()
            self._busy.append(worker)
        reason, alive = None, True
        try:
            reason = worker.make(job, fresh, watch)
        except WorkerDied as death:
            reason, alive = str(death), False
            watch(Event("failed", job.name, text=reason))
        with self._lock:
            self._busy.remove(worker)
            if alive:
                self._idle.append(worker)
        return reason


class RunProcess:
    """A worker process with `threads` threads."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=serve, args=(remote, threads), daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # a script would run again: its classes come with the jobs
        try:
            self.process.start()
        finally:
            sys.modules["__main__"] = main
        remote.close()

    def make(self, job: Job, fresh: bool, watch: Watch) -> str | None:
        """Make a run; return why it failed, or None (also when it was stopped). Raise `WorkerDied`."""
        try:
            self.connection.send_bytes(cloudpickle.dumps((job, fresh)))  # with classes of a notebook
            while isinstance(message := self.connection.recv(), Event):
                watch(message)
        except (EOFError, OSError):
            self.process.join()
            raise WorkerDied(f"its worker process died (exit code {self.process.exitcode})") from None
        reason: str | None = message
        return reason

    def stop(self) -> None:
        """End the run after the round in progress."""
        with suppress(OSError):
            self.connection.send(STOP)

    def end(self, busy: bool) -> None:
        """End the process; if busy, it saves its run."""
        if busy:
            self.process.terminate()
            self.process.join(SAVING_SECONDS)
            self.process.kill()
        else:
            self.connection.close()
        self.process.join()


class RunActorHandle:
    """A Ray actor with `threads` cores and threads. It writes its run's files: all nodes must share the file system."""

    def __init__(self, ray: Any, session: Session, threads: int) -> None:
        self.ray, self.session, self.threads = ray, session, threads
        self.call: Any = None
        self.actor = ray.remote(RunActor).options(num_cpus=threads, max_concurrency=2).remote(threads)
        self.started = self.actor.take_events.remote()
        self.stopping = False

    def make(self, job: Job, fresh: bool, watch: Watch) -> str | None:
        """Make a run; see `RunProcess.make`. Paths become absolute, since an actor has a working folder of its own."""
        folder = str(job.configuration.folder.resolve())
        configuration = dataclasses.replace(job.configuration, directory=folder)
        job = dataclasses.replace(job, configuration=configuration, path=job.path.resolve())
        try:
            while not self._done(self.started):
                if self.stopping:
                    return None
                if not has_room(self.ray, self.threads, 0):
                    self.end(busy=True)
                    raise WorkerDied(f"no node of the Ray cluster has {self.threads} CPU for it")
            call = self.call = self.actor.make.remote(job, fresh)
            done = False
            while not done:
                done = self._done(call)
                for event in self.ray.get(self.actor.take_events.remote()):
                    watch(event)
            reason: str | None = self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            raise WorkerDied(DIED if self.session.died else f"its actor died: {ending(error)}") from None
        return reason

    def _done(self, call: Any) -> bool:
        """Return True if a call was answered, after a while. Raise `WorkerDied` when the local cluster has died."""
        done, _ = self.ray.wait([call], timeout=ACTOR_SECONDS)
        if not done and self.session.died:
            raise WorkerDied(DIED)
        return bool(done)

    def stop(self) -> None:
        """End the run after its round."""
        self.stopping = True
        self.actor.stop.remote()

    def end(self, busy: bool) -> None:
        """End the actor; if busy, it saves its run."""
        if busy and self.call is not None:
            self.stop()
            self.ray.wait([self.call], timeout=SAVING_SECONDS)
        self.ray.kill(self.actor)


RunPool = SerialPool | WorkerPool


def make_pool(configuration: Configuration, runs: int, waiting: int, tasks: Tasks) -> RunPool:
    """Return the pool for those of `runs` runs that are waiting. Raises as `load_ray` and `join`."""
    size, threads = configuration.runs_at_a_time, threads_each(configuration, runs)
    if configuration.pool != "processes" and waiting > 0:
        ray = load_ray()
        session = join(LOCAL if configuration.pool == "ray" else configuration.pool, size * threads, 0, STORE)
        return WorkerPool(size, lambda: RunActorHandle(ray, session, threads), lambda: leave(session))
    if size > 1 and waiting > 1:
        return WorkerPool(min(size, waiting), lambda: RunProcess(threads))
    return SerialPool(tasks, threads)
