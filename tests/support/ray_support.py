"""Methods, scripts and process helpers for tests of the Ray engine.

Its actors import this module.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedloom.algorithm.records import Message
from fedloom.algorithms.fedavg import FedAvg
from fedloom.local.cohort import Cohort

SCRIPT = """
import os
import sys
import ray
import torch
from fedloom.algorithms.fedavg import FedAvg
from fedloom.engines.choose import make_engine
from fedloom.engines.rows import RowsEngine
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from ray_support import descendants
from small_task import small_task

torch.set_num_threads(1)


class Own(FedAvg):
    "Of this file alone, and made without importing it anew."

    def train(self, cohort, inbox):
        message = super().train(cohort, inbox)
        return {"model": message["model"] * factor}


factor = 0.5  # no guard below: nothing runs this file again
where = sys.argv[1]
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=40, _temp_dir=where)
task = small_task()
engine = make_engine("ray", task, workers=1)
assert not engine.session.started


def model(engine):
    federation = Federation(Own(), task, engine, Schedule(rounds=2, participation=1.0, seed=1))
    federation.run()
    return federation.model()


assert torch.equal(model(engine), model(RowsEngine(task)))
engine.close()
assert ray.is_initialized(), "the program's own cluster stays"
print(*descendants(), flush=True)
ray.shutdown()
before = os.environ.get("RAY_AUTH_MODE")
engine = make_engine("ray", task, workers=1)
assert engine.session.started
print(*descendants(), flush=True)
assert {*engine.processes} <= {*descendants()}
folder = engine.session.folder
engine.close()
engine.close()
assert folder is None or not folder.exists()
assert not ray.is_initialized()
assert os.environ.get("RAY_AUTH_MODE") == before, "Ray's setting for the whole program is taken back"
"""
"""A program with its own cluster and method, run as `python script.py FOLDER`. It then runs with
a new local cluster, and prints the processes of both.
"""


@dataclass
class Echoing(FedAvg):
    """A method that replies with the received tensor."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return {"model": inbox["model"]}


def descendants(of: int | None = None) -> list[int]:
    """Return the descendants of a process (by default this one)."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdigit() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    processes, waiting = [], [os.getpid() if of is None else of]
    while waiting:
        started = children.get(waiting.pop(), [])
        processes += started
        waiting += started
    return processes


class Stopped:
    """Stops selected descendants of this process as soon as they appear, until `wake`.

    The test selects them by their command.
    """

    def __init__(self, chosen: Callable[[str], bool], spared: set[int]) -> None:
        self.processes: set[int] = set()
        self._chosen, self._spared = chosen, spared
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._stop, daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        while not self._awake.is_set():
            for process in {*descendants()} - self._spared - self.processes:
                with suppress(OSError):
                    if self._chosen(Path(f"/proc/{process}/cmdline").read_text()):
                        os.kill(process, signal.SIGSTOP)
                        self.processes.add(process)

    def wake(self) -> None:
        """Let the stopped processes continue."""
        self._awake.set()
        self._thread.join()
        for process in self.processes:
            with suppress(OSError):
                os.kill(process, signal.SIGCONT)


@contextmanager
def stopped(chosen: Callable[[str], bool], spared: set[int]) -> Iterator[Stopped]:
    """Stop processes until `wake`, or until the end."""
    stopper = Stopped(chosen, spared)
    try:
        yield stopper
    finally:
        stopper.wake()


def gone(processes: Iterable[int], patience: float = 600.0) -> bool:
    """Return True if all processes end; the default patience is long enough for any machine."""
    until = time.monotonic() + patience
    while any((fields := _stat(process)) is not None and fields[0] != "Z" for process in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def gone_soon(processes: Iterable[int], seconds: float = 5.0) -> bool:
    """Return True if all processes end within this many seconds of processor time.

    A busy processor counts the seconds, so they last longer on a loaded machine.
    """
    watched, began = list(processes), time.process_time()
    while not gone(watched, patience=0):
        if time.process_time() - began > seconds:
            return False
    return True


def _stat(process: int) -> list[str] | None:
    """Return state, parent and further fields of a process; None if it does not exist."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
