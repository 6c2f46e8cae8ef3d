"""What runs in the workers of a pool of runs: in a process, one run after the other until its parent closes the pipe, or in a
Ray actor."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from fedloom.engines.ray.actor import end_with_the_node

if TYPE_CHECKING:
    from fedloom.experiment.events import Event
    from fedloom.experiment.jobs import Job

STOP = "stop"
"""The message that ends a run after the round in progress."""


def serve(connection: Connection, threads: int) -> None:
    """Make the runs that the parent sends. Ctrl-C also reaches this process, but the parent decides what it means.

    Importing PyTorch takes seconds, in which the parent may end: the thread that watches it starts before that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    gc.disable()  # it would go over all that is being imported, again and again
    import torch

    from fedloom.experiment.jobs import Tasks, attempt
    from fedloom.rounds.termination import Terminated, sigterm_interrupts

    gc.freeze()
    gc.enable()
    torch.set_num_threads(threads)
    tasks = Tasks()

    def watch(event: Event) -> None:
        connection.send(event)
        if connection.poll() and connection.recv() == STOP:
            raise KeyboardInterrupt

    def work() -> None:
        while True:
            told = connection.recv()
            if told == STOP:
                continue  # between two runs
            job, fresh = told
            try:
                connection.send(attempt(job, watch, fresh, tasks))
            except Terminated:
                raise
            except KeyboardInterrupt:
                connection.send(None)

    with suppress(EOFError, Terminated), sigterm_interrupts():
        work()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class RunActor:
    """What runs in an actor: one thread makes the run, another answers calls."""

    def __init__(self, threads: int) -> None:
        end_with_the_node()
        from fedloom.experiment.jobs import Tasks

        self.threads = threads
        self.tasks = Tasks()
        self.events: deque[Event] = deque()
        self.stopping = threading.Event()

    def make(self, job: Job, fresh: bool) -> str | None:
        """Make one run; what went wrong, or None (also when told to stop)."""
        import torch

        from fedloom.experiment.jobs import attempt

        torch.set_num_threads(self.threads)

        def watching(event: Event) -> None:
            self.events.append(event)
            if self.stopping.is_set():
                raise KeyboardInterrupt

        try:
            return attempt(job, watching, fresh, self.tasks)
        except KeyboardInterrupt:
            return None

    def heard(self) -> list[Event]:
        """The events since the last call."""
        return [self.events.popleft() for _ in range(len(self.events))]

    def stop(self) -> None:
        """End the run after the round in progress."""
        self.stopping.set()
