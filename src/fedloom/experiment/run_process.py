"""The workers of a pool of runs: a process that makes runs until its parent closes the pipe, or a Ray actor."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from fedloom.engines.worker_life import exit_with_parent, importing

if TYPE_CHECKING:
    from fedloom.experiment.events import Event
    from fedloom.experiment.jobs import Job

STOP = "stop"
"""The message that ends a run after the round in progress."""


def serve(connection: Connection, threads: int) -> None:
    """Make the runs that the parent sends. It is watched before PyTorch is imported, which takes seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    exit_with_parent(parent.pid if parent else None)
    with importing():
        import torch

        from fedloom.experiment.jobs import Tasks, attempt
        from fedloom.rounds.termination import Terminated, sigterm_interrupts

    torch.set_num_threads(threads)
    tasks = Tasks()

    def watch(event: Event) -> None:
        connection.send(event)
        if connection.poll() and connection.recv() == STOP:
            raise KeyboardInterrupt

    with suppress(EOFError, Terminated), sigterm_interrupts():
        while True:
            message = connection.recv()
            if message == STOP:
                continue  # between two runs
            job, fresh = message
            try:
                connection.send(attempt(job, watch, fresh, tasks))
            except Terminated:
                raise
            except KeyboardInterrupt:
                connection.send(None)


class RunActor:
    """A Ray actor: one thread makes the run, another answers calls."""

    def __init__(self, threads: int) -> None:
        exit_with_parent()
        from fedloom.experiment.jobs import Tasks

        self.threads = threads
        self.tasks = Tasks()
        self.events: deque[Event] = deque()
        self.stopping = threading.Event()

    def make(self, job: Job, fresh: bool) -> str | None:
        """Make one run; return why it failed, or None (also when it was stopped)."""
        import torch

        from fedloom.experiment.jobs import attempt

        torch.set_num_threads(self.threads)

        def watch(event: Event) -> None:
            self.events.append(event)
            if self.stopping.is_set():
                raise KeyboardInterrupt

        try:
            return attempt(job, watch, fresh, self.tasks)
        except KeyboardInterrupt:
            return None

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        return [self.events.popleft() for _ in range(len(self.events))]

    def stop(self) -> None:
        """End the run after the round in progress."""
        self.stopping.set()
