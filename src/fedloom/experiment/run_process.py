"""What runs in a worker process of a pool of runs: run after run until the pipe to its parent closes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait

STOP = "stop"
"""Said to a worker: let the round under way be the last of its run."""


def serve(connection: Connection, threads: int) -> None:
    """Ctrl-C reaches the whole group of processes, but the parent alone decides. It may end while all else is still being
    imported, so it is watched from the start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _serve(connection, threads)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _serve(connection: Connection, threads: int) -> None:
    import torch

    from fedloom.experiment.events import Event
    from fedloom.experiment.jobs import Tasks, attempt

    torch.set_num_threads(threads)
    tasks = Tasks()

    def watch(event: Event) -> None:
        connection.send(event)
        if connection.poll() and connection.recv() == STOP:
            raise KeyboardInterrupt

    while True:
        try:
            told = connection.recv()
        except EOFError:
            return
        if told == STOP:
            continue  # between two runs
        job, fresh = told
        try:
            connection.send(attempt(job, watch, fresh, tasks))
        except KeyboardInterrupt:
            connection.send(None)
