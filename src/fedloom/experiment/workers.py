"""Worker processes that each train one run at a time. They share nothing but a pipe with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from fedloom.errors import FedloomError
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.run import run_configured
from fedloom.task import Task

_STOP = "stop"
_STOPPED = "stopped"


def attempt(
    configuration: Configuration,
    name: RunName,
    watch: Watch,
    fresh: bool,
    make_task: Callable[[int], Task] | None = None,
) -> str | None:
    """Make one run; what went wrong, on one line, or None. With FEDLOOM_TRACEBACK set, where it went wrong is printed too."""
    try:
        run_configured(configuration, name, watch, fresh=fresh, make_task=make_task)
    except Exception as error:
        if "FEDLOOM_TRACEBACK" in os.environ:
            traceback.print_exc()
        kind = "" if isinstance(error, FedloomError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())
        watch(Event("failed", name, text=reason))
        return reason
    return None


def run_in_workers(
    configuration: Configuration, names: Sequence[RunName], watch: Watch, fresh: bool, stopped: Callable[[], bool]
) -> dict[RunName, str]:
    """Make the runs, `configuration.workers` at a time; returns what went wrong, by run.

    When `stopped` says so, every worker finishes its round; then `KeyboardInterrupt` is raised. A worker that dies fails its
    run alone.
    """
    waiting, failed, stopping = deque(names), dict[RunName, str](), False
    crew: list[_Worker] = []
    try:
        while waiting or any(worker.name for worker in crew):
            for worker in crew:
                if worker.name is None and waiting:
                    worker.begin(waiting.popleft())
            while waiting and len(crew) < configuration.workers:
                crew.append(_Worker.start(configuration, fresh))
                crew[-1].begin(waiting.popleft())
            for worker in _speaking(crew):
                failed |= worker.listen(watch)
                if worker.gone:
                    crew.remove(worker)
            if stopped() and not stopping:
                stopping = True
                waiting.clear()
                for worker in crew:
                    worker.connection.send(_STOP)
    finally:
        for worker in crew:
            worker.end()
    if stopping:
        raise KeyboardInterrupt
    return failed


@dataclass(eq=False)
class _Worker:
    """A worker process as its parent sees it, and the run it is busy with."""

    process: SpawnProcess
    connection: Connection
    name: RunName | None = None
    gone: bool = False

    @classmethod
    def start(cls, configuration: Configuration, fresh: bool) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        threads = configuration.threads or max(1, torch.get_num_threads() // configuration.workers)
        process = context.Process(target=_work, args=(theirs, configuration, fresh, threads), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def begin(self, name: RunName) -> None:
        self.name = name
        self.connection.send(name)

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


def _work(connection: Connection, configuration: Configuration, fresh: bool, threads: int) -> None:
    """The worker: run after run until the pipe closes.

    Ctrl-C reaches the whole group of processes, but the parent alone decides; and no worker outlives its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    torch.set_num_threads(threads)

    def passing(event: Event) -> None:
        connection.send(event)
        if connection.poll() and connection.recv() == _STOP:
            raise KeyboardInterrupt

    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        if not isinstance(name, RunName):
            continue  # told to stop between two runs
        try:
            connection.send(attempt(configuration, name, passing, fresh))
        except KeyboardInterrupt:
            connection.send(_STOPPED)


def _die_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
