"""The workers of a pool of runs: a process that makes runs until its parent ends it, or a Ray task
for each run.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from fedloom.engines.worker_life import exit_with_parent, importing, join_parent

if TYPE_CHECKING:
    from fedloom.runs.events import Event
    from fedloom.study.jobs import RunJob


def main() -> None:
    """Make the runs that the parent sends. An empty message ends a run after its round."""
    threads, pipe = join_parent()
    with importing():
        import torch

        from fedloom.common.termination import Terminated, sigterm_interrupts
        from fedloom.study.jobs import Tasks, attempt

    torch.set_num_threads(threads)
    tasks, connection = Tasks(), Connection(pipe)

    def watch(event: Event) -> None:
        connection.send(event)
        if connection.poll():
            raise KeyboardInterrupt

    with suppress(EOFError, Terminated), sigterm_interrupts():
        while message := connection.recv_bytes():
            job, fresh = pickle.loads(message)
            try:
                connection.send(attempt(job, watch, fresh, tasks))
            except Terminated:
                raise
            except KeyboardInterrupt:
                connection.send(None)


class EventBoard:
    """A Ray actor that keeps the events of runs for their pool, and answers each with whether the
    run is to stop.
    """

    def __init__(self) -> None:
        exit_with_parent()
        self.events: list[tuple[None, Event]] = []
        self.stopping = False

    def add(self, event: Event) -> bool:
        self.events.append((None, event))
        return self.stopping

    def get(self, stopping: bool) -> list[tuple[None, Event]]:
        """Return the events since the last call, as messages; `stopping` ends the runs after their
        rounds.
        """
        events, self.events, self.stopping = self.events, [], stopping
        return events


def make_in_ray(job: RunJob, fresh: bool, threads: int, board: Any) -> str | None:
    """Make a run in a Ray task.

    Args:
        job: The run.
        fresh: Start the run again.
        threads: Threads of PyTorch in this process.
        board: Handle of an `EventBoard`. It gets the events and can stop the run.

    Returns:
        The reason of a failure on one line. None for a finished run, and for one that was stopped.
    """
    exit_with_parent()
    from fedloom.engines.ray.session import load_ray
    from fedloom.engines.work import using_threads
    from fedloom.study.jobs import Tasks, attempt

    def watch(event: Event) -> None:
        if load_ray().get(board.add.remote(event)):
            raise KeyboardInterrupt

    with using_threads(threads), suppress(KeyboardInterrupt):
        return attempt(job, watch, fresh, Tasks())
    return None
