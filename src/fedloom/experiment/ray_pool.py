"""A pool of Ray actors that each make one run at a time, on this machine or on a cluster whose nodes share its file system."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.engines.ray.crew import ending
from fedloom.engines.ray.session import LOCAL, join, leave, load_ray
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.jobs import Job, Tasks, attempt

STORE = 128 * 1024**2
"""Bytes for objects on a cluster that is started here: jobs and events are small."""

PAUSE = 0.5
"""Seconds between two looks at what the actors say."""


@dataclass(eq=False)
class _Hand:
    """An actor, and the run it is busy with."""

    actor: Any
    name: RunName | None = None
    call: Any = None


class RayPool:
    """As many actors as `workers`, with `threads` cores and threads each, on the cluster at `address` (see
    `fedloom.engines.ray.session.join`) or on one of this machine that is started here.

    Runs are written where the actor is, so the nodes must share the file system in which the runs lie. Raises as `join`.
    """

    def __init__(self, workers: int, threads: int | None, address: str = LOCAL) -> None:
        self.ray = load_ray()
        self.size = workers
        self.threads = threads or max(1, torch.get_num_threads() // workers)
        self.session = join(address, workers * self.threads, 0, STORE)
        self._hands: list[_Hand] = []

    def run(self, jobs: Sequence[Job], watch: Watch, fresh: bool, stopped: Callable[[], bool]) -> dict[RunName, str]:
        """As `Pool.run`."""
        waiting, failed, stopping = deque(jobs), dict[RunName, str](), False
        while waiting or any(hand.name for hand in self._hands):
            self._begin(waiting, fresh)
            busy = [hand for hand in self._hands if hand.name]
            done, _ = self.ray.wait([hand.call for hand in busy], num_returns=1, timeout=PAUSE)
            for hand in busy:
                failed |= self._listen(hand, hand.call in done, watch)
            if stopped() and not stopping:
                stopping = True
                waiting.clear()
                for hand in self._hands:
                    hand.actor.stop.remote()
        if stopping:
            raise KeyboardInterrupt
        return failed

    def close(self) -> None:
        """End the actors, and the cluster where it was started here."""
        for hand in self._hands:
            self.ray.kill(hand.actor)
        self._hands.clear()
        leave(self.session)

    def _begin(self, waiting: deque[Job], fresh: bool) -> None:
        """Give every idle actor a run, and call for more of them where there is work."""
        make = self.ray.remote(Maker).options(num_cpus=self.threads, max_concurrency=2)
        while waiting and len(self._hands) < self.size:
            self._hands.append(_Hand(make.remote(self.threads)))
            self._give(self._hands[-1], waiting.popleft(), fresh)
        for hand in self._hands:
            if hand.name is None and waiting:
                self._give(hand, waiting.popleft(), fresh)

    def _give(self, hand: _Hand, job: Job, fresh: bool) -> None:
        """Paths are told in full: an actor works in a folder of its own."""
        folder = str(job.configuration.folder.resolve())
        told = dataclasses.replace(job.configuration, directory=folder)
        whole = dataclasses.replace(job, configuration=told, path=job.path.resolve())
        hand.name, hand.call = job.name, hand.actor.make.remote(whole, fresh)

    def _listen(self, hand: _Hand, done: bool, watch: Watch) -> dict[RunName, str]:
        """What an actor has to say, and why its run failed if it did. One that died fails its run alone."""
        assert hand.name is not None
        try:
            reason = self.ray.get(hand.call) if done else None
            for event in self.ray.get(hand.actor.heard.remote()):
                watch(event)
        except self.ray.exceptions.RayError as error:
            self._hands.remove(hand)
            reason, done = f"its actor died: {ending(error)}", True
            watch(Event("failed", hand.name, text=reason))
        if not done:
            return {}
        name, hand.name = hand.name, None
        return {} if reason is None else {name: reason}


class Maker:
    """What runs in an actor: one thread makes the run, the other answers."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.tasks = Tasks()
        self.events: deque[Event] = deque()
        self.stopping = threading.Event()

    def make(self, job: Job, fresh: bool) -> str | None:
        """Make one run; what went wrong, or None (also when told to stop)."""
        torch.set_num_threads(self.threads)

        def passing(event: Event) -> None:
            self.events.append(event)
            if self.stopping.is_set():
                raise KeyboardInterrupt

        try:
            return attempt(job, passing, fresh, self.tasks)
        except KeyboardInterrupt:
            return None

    def heard(self) -> list[Event]:
        """What happened since it was last asked."""
        return [self.events.popleft() for _ in range(len(self.events))]

    def stop(self) -> None:
        """Let the round under way be the last."""
        self.stopping.set()
