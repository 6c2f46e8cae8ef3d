"""The workers of a pool of runs: a process that makes runs until its parent ends it, or a Ray task for each run."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from fedloom.engines.worker_life import exit_with_parent, importing

if TYPE_CHECKING:
    from fedloom.experiment.events import Event
    from fedloom.experiment.jobs import Job, Tasks


def serve(connection: Connection, stopping: Any, threads: int) -> None:
    """Make the runs that the parent sends; `stopping.value` ends the one in progress after its round.

    The parent is watched before PyTorch is imported, which takes seconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    exit_with_parent(parent.pid if parent else None)
    with importing():
        _tasks()
    from fedloom.rounds.termination import Terminated, sigterm_interrupts

    def send(event: Event) -> bool:
        connection.send(event)
        return bool(stopping.value)

    with suppress(EOFError, Terminated), sigterm_interrupts():
        while True:
            job, fresh = connection.recv()
            connection.send(_make(job, fresh, threads, send))


def make_in_ray(job: Job, fresh: bool, threads: int, board: Any) -> str | None:
    """Make a run in a Ray task, whose events go to the `board`; return why it failed, or None (also when it was stopped)."""
    from fedloom.engines.ray.session import load_ray

    _exit_with_raylet()
    return _make(job, fresh, threads, lambda event: bool(load_ray().get(board.add.remote(event))))


class EventBoard:
    """A Ray actor that keeps the events of all runs for their pool, and answers each with whether the run is to stop."""

    def __init__(self) -> None:
        exit_with_parent()
        self.events: list[Event] = []
        self.stopping = False

    def add(self, event: Event) -> bool:
        self.events.append(event)
        return self.stopping

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def stop(self) -> None:
        self.stopping = True


@cache
def _exit_with_raylet() -> None:
    exit_with_parent()


@cache
def _tasks() -> Tasks:
    from fedloom.experiment.jobs import Tasks

    return Tasks()


def _make(job: Job, fresh: bool, threads: int, send: Callable[[Event], bool]) -> str | None:
    """Make a run until an event is answered with True; return why it failed, or None."""
    import torch

    from fedloom.experiment.jobs import attempt
    from fedloom.rounds.termination import Terminated

    torch.set_num_threads(threads)

    def watch(event: Event) -> None:
        if send(event):
            raise KeyboardInterrupt

    try:
        return attempt(job, watch, fresh, _tasks())
    except Terminated:
        raise
    except KeyboardInterrupt:
        return None
