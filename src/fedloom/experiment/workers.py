"""Worker processes that each train one run at a time. They share nothing but a pipe with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.jobs import Job, Tasks, attempt

_STOP = "stop"
_STOPPED = "stopped"


class Crew:
    """A pool of worker processes, `workers` of them at most, with `threads` threads each (None: PyTorch's, shared out).

    They start when there is work and stay until the crew is closed. One that dies fails its run alone.
    """

    def __init__(self, workers: int, threads: int | None = None) -> None:
        self.size = workers
        self.threads = threads or max(1, torch.get_num_threads() // workers)
        self._workers: list[_Worker] = []

    def run(self, jobs: Sequence[Job], watch: Watch, fresh: bool, stopped: Callable[[], bool]) -> dict[RunName, str]:
        """As `Pool.run`."""
        waiting, failed, stopping = deque(jobs), dict[RunName, str](), False
        crew = self._workers
        while waiting or any(worker.name for worker in crew):
            for worker in crew:
                if worker.name is None and waiting:
                    worker.begin(waiting.popleft(), fresh)
            while waiting and len(crew) < self.size:
                crew.append(_Worker.start(self.threads))
                crew[-1].begin(waiting.popleft(), fresh)
            for worker in _speaking(crew):
                failed |= worker.listen(watch)
                if worker.gone:
                    crew.remove(worker)
            if stopped() and not stopping:
                stopping = True
                waiting.clear()
                for worker in crew:
                    worker.connection.send(_STOP)
        if stopping:
            raise KeyboardInterrupt
        return failed

    def close(self) -> None:
        """Send the workers home."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()


@dataclass(eq=False)
class _Worker:
    """A worker process as its parent sees it, and the run it is busy with."""

    process: SpawnProcess
    connection: Connection
    name: RunName | None = None
    gone: bool = False

    @classmethod
    def start(cls, threads: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, threads), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def begin(self, job: Job, fresh: bool) -> None:
        self.name = job.name
        self.connection.send((job, fresh))

    def listen(self, watch: Watch) -> dict[RunName, str]:
        """Take what the worker says next; a run that failed is returned with its reason."""
        assert self.name is not None
        try:
            said = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            self.gone = True
            reason = f"its worker process died (exit code {self.process.exitcode})"
            watch(Event("failed", self.name, text=reason))
            name, self.name = self.name, None
            return {name: reason}
        if isinstance(said, Event):
            watch(said)
            return {}
        name, self.name = self.name, None
        return {} if said is None else {name: said}

    def end(self) -> None:
        """An idle worker goes home by itself; one that is still busy is not waited for."""
        if self.name is not None:
            self.process.kill()
        self.connection.close()
        self.process.join()


def _speaking(crew: Sequence[_Worker]) -> list[_Worker]:
    busy = {worker.connection: worker for worker in crew if worker.name is not None}
    return [busy[connection] for connection in wait(list(busy), timeout=0.2) if isinstance(connection, Connection)]


def _work(connection: Connection, threads: int) -> None:
    """The worker: run after run until the pipe closes.

    Ctrl-C reaches the whole group of processes, but the parent alone decides; and no worker outlives its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    torch.set_num_threads(threads)
    tasks = Tasks()

    def passing(event: Event) -> None:
        connection.send(event)
        if connection.poll() and connection.recv() == _STOP:
            raise KeyboardInterrupt

    while True:
        try:
            told = connection.recv()
        except EOFError:
            return
        if told == _STOP:
            continue  # between two runs
        job, fresh = told
        try:
            connection.send(attempt(job, passing, fresh, tasks))
        except KeyboardInterrupt:
            connection.send(_STOPPED)


def _die_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
