"""The worker process of a pool of runs."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from fedloom.engines.worker_life import exit_with_parent, importing

if TYPE_CHECKING:
    from fedloom.experiment.events import Event


def serve(connection: Connection, stopping: Any, threads: int) -> None:
    """Make the runs that the parent sends; `stopping.value` ends the one in progress after its round.

    The parent is watched before PyTorch is imported, which takes seconds.
    """
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
        if stopping.value:
            raise KeyboardInterrupt

    with suppress(EOFError, Terminated), sigterm_interrupts():
        while True:
            job, fresh = connection.recv()
            try:
                connection.send(attempt(job, watch, fresh, tasks))
            except Terminated:
                raise
            except KeyboardInterrupt:
                connection.send(None)
