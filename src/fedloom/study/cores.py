"""The number of runs at a time and of threads in each, by rules that measure nothing."""

import os

import torch

from fedloom.common.device import find_device
from fedloom.engines.choose import by_rule, read_engine
from fedloom.runs.configuration import Configuration

RUN_BYTES = 2 << 30
"""Memory that a run in a worker process is assumed to need."""


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def runs_side_by_side(configuration: Configuration, runs: int) -> int:
    """Return the number of runs that are made at a time.

    Args:
        configuration: The configuration. `workers` is used unless it is `auto`.
        runs: Number of all runs.

    Returns:
        1 if a run uses several cores or a GPU, else a run for each usable core, as far as memory
        allows.
    """
    if configuration.workers != "auto":
        return configuration.workers
    if _spreads_itself(configuration) or configuration.pool not in ("processes", "ray"):
        return 1
    return max(1, min(runs, usable_cores(), _memory() // RUN_BYTES))


def threads_each(configuration: Configuration, runs: int) -> int:
    """Return the number of threads of each run.

    It does not depend on `workers`, so the last digits of the figures do not either.

    Args:
        configuration: The configuration. `threads` is used if it is set.
        runs: Number of all runs, which share the threads of PyTorch.

    Returns:
        At least 1.
    """
    sharing = configuration.runs_at_a_time if _spreads_itself(configuration) else runs
    return configuration.threads or max(1, torch.get_num_threads() // max(1, sharing))


def _spreads_itself(configuration: Configuration) -> bool:
    """Return True if a single run uses several cores or a GPU."""
    entry, _ = read_engine(configuration.engine)
    one_core = entry.make is by_rule or entry.name in ("rows", "stacked")
    return not one_core or find_device(configuration.device).type != "cpu"


def _memory() -> int:
    """Return the bytes of this machine's memory on POSIX systems; elsewhere enough for any number
    of runs.
    """
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return RUN_BYTES * usable_cores()
