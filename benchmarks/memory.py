"""Compare peak memory with the necessary memory.

Necessary are the models of a round, the data and one model's activations. Rounds: ten clients per
round in each engine, each measured in a separate process. The memory of worker processes beyond
their imports and shared memory is added. A method with a pool of models holds two pools at the end
of a round, the sent one and the received one, because a failed round must leave everything
unchanged; `must_mb` counts both. Server: work on models of VGG-16's size, over their own bytes.
`over_mb` is the peak above the memory after the imports, without the pages of program files that
were loaded later.

    python benchmarks/memory.py [--tasks cnn,vgg16] [--engines rows,stacked] [--rounds 2]
        [--models 20]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

from engines import TASKS, random_task
from fedloom.engines.choose import make_engine
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import ROWS_HELD, bytes_of_training
from fedloom.flat.population import (
    mean_cosine_similarity,
    recombine_,
    squared_distances,
    weighted_mean,
)
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from outcome import tell

CLIENTS = 10
VGG = 14_728_266
LARGE: dict[str, Callable[[int], Task]] = {
    "vgg16": lambda clients: random_task(
        "fedmr_vgg16", (3, 32, 32), clients, 20, batch_size=10, momentum=0.9
    )
}
"""Models that exceed all other memory: 33.6 M weights; ten models have 1.3 GB."""

POOLS = {"fedavg": 1, "fedmr": 2}
"""Number of pools of all clients' models that a method holds at the end of a round."""


def status(name: str, pid: int | str = "self") -> float:
    """Return a figure of a process's memory in MB.

    `VmHWM` is the peak and `VmRSS` the present memory. `RssFile` and `RssShmem` are its pages of
    files and shared memory.
    """
    match = re.search(
        rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return 0.0 if match is None else int(match[1]) / 1e3


def peak(pid: int | str = "self") -> float:
    """Return the peak memory of a process in MB, without pages of program files.

    Shared memory is excluded too, except for this process.
    """
    return (
        status("VmHWM", pid)
        - status("RssFile", pid)
        - (0.0 if pid == "self" else status("RssShmem", pid))
    )


def imports() -> float:
    """Return the MB of this process after its imports; every worker holds about the same."""
    return status("VmRSS") - status("RssFile")


def must_hold(task: Task, pools: int) -> float:
    """Return MB of the models, the samples, and a step's activations for its backward pass."""
    rows = task.layout.size * task.initial.element_size()
    activations = bytes_of_training(task, RowsEngine(task).flat_module) - ROWS_HELD * rows
    return (
        pools * CLIENTS * rows + task.train.inputs.nbytes + task.train.labels.nbytes + activations
    ) / 1e6


def of_rounds(name: str, engine_name: str, method: str, rounds: int) -> dict[str, Any]:
    """Measure the peak of some rounds over the necessary memory, in this process."""
    imported = imports()
    task = (TASKS | LARGE)[name](CLIENTS)
    must = must_hold(task, POOLS[method])
    engine = make_engine(engine_name, task)
    schedule = Schedule(rounds=rounds, participation=1.0, evaluate_every=rounds + 9)
    federation = Federation(build(method), task, engine, schedule)
    federation.step()
    workers = engine.processes if isinstance(engine, ProcessesEngine) else []
    for _ in range(rounds - 1):
        federation.step()
    own_peak = peak() - imported
    theirs = sum(peak(pid) - imported for pid in workers)
    engine.close()
    return {"what": f"{name}, {method}", "where": engine_name, "must_mb": must, "over_mb": own_peak + theirs,
            "ratio": (own_peak + theirs) / must}  # fmt: skip


def of_server(job_name: str, models: int) -> dict[str, Any]:
    """Measure the peak of server work over the models' own bytes, in this process."""
    imported = imports()
    pool = torch.empty(models, VGG).uniform_(generator=torch.Generator().manual_seed(0))
    sixteenth = VGG // 16
    units = [(slice(k * sixteenth, (k + 1) * sixteenth),) for k in range(16)]
    jobs: dict[str, Callable[[], object]] = {
        "recombine": lambda: recombine_(pool, units, torch.Generator().manual_seed(1)),
        "mean": lambda: weighted_mean(pool, torch.arange(1.0, models + 1)),
        "cosine": lambda: mean_cosine_similarity(pool),
        "distances": lambda: squared_distances(pool),
    }
    jobs[job_name]()
    must = pool.nbytes / 1e6
    over = peak() - imported
    return {"what": f"{job_name}, {models} x {VGG / 1e6:.1f} M", "where": "server", "must_mb": must, "over_mb": over,
            "ratio": over / must}  # fmt: skip


def separate_process(*arguments: str) -> dict[str, Any]:
    """Return one line, measured in a separate process."""
    done = subprocess.run(
        [sys.executable, __file__, "--alone", *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    line: dict[str, Any] = json.loads(done.stdout)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="mlp,cnn,vgg16")
    parser.add_argument("--engines", default="rows,stacked,processes,processes(inside=stacked)")
    parser.add_argument("--methods", default=",".join(POOLS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--models", type=int, default=20, help="models on the server (100 need 6 GB)"
    )
    parser.add_argument("--alone", nargs="+", help="measure one line in this process")
    arguments = parser.parse_args()
    if arguments.alone:
        kind, name, *options = arguments.alone
        if kind == "server":
            line = of_server(name, int(options[0]))
        else:
            engine, method, rounds = options
            line = of_rounds(name, engine, method, int(rounds))
        print(json.dumps(line))
        return
    rows = [
        separate_process("server", job, str(arguments.models))
        for job in ("recombine", "mean", "cosine", "distances")
    ]
    names = re.split(r",(?![^(]*\))", arguments.engines)
    lines = product(arguments.tasks.split(","), names, arguments.methods.split(","))
    rows += [separate_process("rounds", *line, str(arguments.rounds)) for line in lines]
    tell("peak of memory over what must be held", rows)


if __name__ == "__main__":
    main()
