"""Runs side by side: how many at a time and with how many threads, by rules without a clock in them."""

from __future__ import annotations

import os

import torch

from fedloom.engines.choose import DEFAULT, read_engine
from fedloom.experiment.configuration import Configuration
from fedloom.flat.device import find_device

RUN_BYTES = 2 << 30
"""Memory that a run in a process of its own is taken to need."""


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def runs_side_by_side(configuration: Configuration, runs: int) -> int:
    """How many of `runs` runs go on at a time: `workers`, or with "auto" one on each core, as far as memory reaches.

    With "auto" it is 1 where the runs use several cores or a GPU themselves, and on a cluster whose size is not known here.
    """
    if configuration.workers != "auto":
        return configuration.workers
    if _spreads_itself(configuration) or configuration.pool not in ("processes", "ray"):
        return 1
    return max(1, min(runs, usable_cores(), _memory() // RUN_BYTES))


def threads_each(configuration: Configuration, runs: int) -> int:
    """Threads of each of `runs` runs: `threads`, or else PyTorch's number divided by the runs.

    It does not depend on how many of them go on at a time, and so neither do the results, down to the last digit. Only engines
    that use several cores themselves share them with the other runs under way.
    """
    together = configuration.runs_at_a_time if _spreads_itself(configuration) else runs
    return configuration.threads or max(1, torch.get_num_threads() // max(1, together))


def _spreads_itself(configuration: Configuration) -> bool:
    """Whether a run uses several cores, or a GPU, by itself."""
    here = read_engine(configuration.engine)[0].name in ("rows", "stacked", DEFAULT)
    return not here or find_device(configuration.device).type != "cpu"


def _memory() -> int:
    """Bytes of this machine's memory, as POSIX systems tell; elsewhere enough for any number of runs."""
    names = getattr(os, "sysconf_names", {})
    known = "SC_PHYS_PAGES" in names
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else RUN_BYTES * usable_cores()
