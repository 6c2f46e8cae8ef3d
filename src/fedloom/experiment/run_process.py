"""What runs in a worker process of a pool of runs: one run after the other, until its parent closes the pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

STOP = "stop"
"""The message that ends a run after the round in progress."""


def serve(connection: Connection, threads: int) -> None:
    """Make the runs that the parent sends. Ctrl-C also reaches this process, but the parent decides what it means.

    Importing PyTorch takes seconds, in which the parent may end: the thread that watches it starts before that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    import torch

    from fedloom.experiment.events import Event
    from fedloom.experiment.jobs import Tasks, attempt
    from fedloom.rounds.termination import Terminated, sigterm_interrupts

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
