"""Measure the gain of worker processes, and of starting the longest clients first.

The figures are seconds of a FedAvg round of ten clients over the same SGD steps on one bare module
on two threads. Bare steps and engines run in turn, round by round; the printed figures are medians.
Clients have equally large data, or log-normal sizes (sigma 0.8) with the same sum. "arrival order"
assigns clients to the workers in the order of the selection. Bare steps on one thread are also
among the rows. On cores with other work, two threads that wait for each other take many times
longer, and ratios to them have no meaning.

    python benchmarks/processes.py [--rounds 7] [--workers 2] [--eager-allocator]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.device import keep_pages
from fedloom.data import Partition
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Engine, Job
from fedloom.rounds.federation import Federation, Schedule
from fedloom.task import Task
from limit import CLIENTS, bare_seconds, cnn, mlp, random_task
from outcome import tell

BARE_THREADS = 2
BARE = "bare steps, 1 thread"


class ArrivalOrder(ProcessesEngine):
    """Clients go to the workers in the order of the selection."""

    def _groups(self, pipeline: Pipeline, jobs: Sequence[Job]) -> list[list[Job]]:
        return [[job] for job in jobs]


def unequal(task: Task, seed: int = 1) -> Task:
    """Return the same samples with log-normal sizes of clients."""
    total = len(task.train)
    draws = np.random.default_rng(seed).lognormal(0.0, 0.8, CLIENTS)
    bounds = np.round(np.cumsum(draws) / draws.sum() * total).astype(np.int64)
    return replace(
        task, partition=Partition.from_sizes(np.arange(total), np.diff(bounds, prepend=0))
    )


def seconds(federation: Federation, threads: int) -> float:
    torch.set_num_threads(threads)
    began = time.perf_counter()
    federation.step()
    return time.perf_counter() - began


def measure(
    name: str, sizes: str, task: Task, rounds: int, workers: int
) -> list[dict[str, str | int | float]]:
    """Run every engine on one task, with the bare steps, in turn."""
    schedule = Schedule(rounds=rounds + 1, participation=1.0, evaluate_every=rounds + 9, seed=3)
    engines: dict[str, tuple[Engine, int]] = {
        "rows, 1 thread": (RowsEngine(task), 1),
        "rows, 2 threads": (RowsEngine(task), 2),
        f"{workers} processes x 1 thread": (ProcessesEngine(task, workers=workers), 1),
        f"{workers} processes, arrival order": (ArrivalOrder(task, workers=workers), 1),
        f"{workers} processes of stacks": (
            ProcessesEngine(task, workers=workers, inside="stacked"),
            1,
        ),
    }
    runs = {
        label: (Federation(FedAvg(), task, engine, schedule), n)
        for label, (engine, n) in engines.items()
    }
    module: nn.Module = copy.deepcopy(task.model)
    taken: dict[str, list[tuple[float, float]]] = {label: [] for label in (BARE, *runs)}
    for _ in range(rounds + 1):
        torch.set_num_threads(BARE_THREADS)
        bare = bare_seconds(module, task, task.initial)
        torch.set_num_threads(1)
        taken[BARE].append((bare, bare_seconds(module, task, task.initial)))
        for label, (federation, threads) in runs.items():
            taken[label].append((bare, seconds(federation, threads)))
    for engine, _ in engines.values():
        engine.close()
    return [
        {
            "what": f"{name}, {sizes} sizes",
            "engine": label,
            "bare_s": statistics.median(bare for bare, _ in pairs[1:]),  # a warm-up
            "ours_s": statistics.median(ours for _, ours in pairs[1:]),
            "ratio": statistics.median(ours / bare for bare, ours in pairs[1:]),
            "best_ratio": min(ours for _, ours in pairs[1:]) / min(bare for bare, _ in pairs[1:]),
        }
        for label, pairs in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--eager-allocator",
        action="store_true",
        help="leave the C library's allocator as it comes, here",
    )
    arguments = parser.parse_args()
    if not arguments.eager_allocator:
        keep_pages()
    rows = []
    for name, task in (
        ("MLP b=10", random_task(mlp(), (784,), 600, 10, 0.0)),
        ("CNN b=50", random_task(cnn(), (3, 32, 32), 500, 50, 0.9)),
    ):
        rows += measure(name, "equal", task, arguments.rounds, arguments.workers)
        rows += measure(name, "unequal", unequal(task), arguments.rounds, arguments.workers)
    tell("a round over the bare steps on two threads, by engine", rows)


if __name__ == "__main__":
    main()
