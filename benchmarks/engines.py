"""Compare a FedAvg round in each engine with the same SGD steps on one bare module.

    python benchmarks/engines.py [--engines rows,stacked,default] [--tasks mlp,logistic]
        [--clients 10,100] [--rounds 5]
    python benchmarks/engines.py --engines rows,default
        --tasks digits_mlp,digits_cnn,digits_logistic --clients 20
    python benchmarks/engines.py --engines rows,stacked --tasks digits_mlp --clients 20
        --methods "fedavg;fedprox;scaffold"

All figures are seconds from one run on one machine. The bare steps run as a user writes them, in a
separate process on equally many threads, twice. `bare_s` uses the C library's default allocator and
is the base of the ratios; `tuned_s` uses an allocator that reuses its pages. All run in turn, round
by round.

- `ratio`: median over rounds of engine over bare, in the same round.
- `best_ratio`: minimum of the engine over minimum of the bare steps.
- `cpu_ratio`: processor time of a round over the bare round, worker processes included. It is the
  better figure on a shared machine. The bare steps are FedAvg with SGD for every method.
- `rows_ratio`: median of the rounds of `rows` over the median of the engine.

The table also shows the engine of `default` for a run of 300 rounds, with the reason.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedloom.common.device import keep_pages
from fedloom.data import Dataset, Partition, Samples
from fedloom.engines.base import engines
from fedloom.engines.choose import make_engine
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from limit import cnn, mlp
from outcome import tell


def random_task(
    model: str | nn.Module, shape: tuple[int, ...], clients: int, samples: int, **training: Any
) -> Task:
    """Return clients with `samples` random samples each, of ten classes."""
    draw = torch.Generator().manual_seed(0)
    total = clients * samples
    train = Samples(
        torch.randn(total, *shape, generator=draw), torch.randint(10, (total,), generator=draw)
    )
    partition = Partition.from_sizes(np.arange(total), [samples] * clients)
    settings = {"learning_rate": 0.01, **training}
    return make_task(
        Dataset("random", train, train[:10], 10),
        partition=partition,
        model=model,
        training=settings,
    )


def mlp_task(clients: int, samples: int = 600) -> Task:
    return random_task(mlp(), (784,), clients, samples, batch_size=10)


def cnn_task(clients: int, samples: int = 500) -> Task:
    return random_task(cnn(), (3, 32, 32), clients, samples, batch_size=50, momentum=0.9)


def resnet_task(clients: int, samples: int = 100) -> Task:
    return random_task("fedmr_resnet20", (3, 32, 32), clients, samples, batch_size=50, momentum=0.9)


def logistic_task(clients: int) -> Task:
    """Return the synthetic data of FedUmf and FedDC; clients have unequal numbers of samples."""
    return make_task(
        f"synthetic(alpha=1.0, beta=1.0, users={clients})",
        clients=clients,
        partition="natural",
        model="logistic",
        training={"learning_rate": 0.1, "batch_size": 50, "epochs": 5},
    )


def digits_task(model: str, clients: int, **changes: Any) -> Task:
    """Return the digits of `make demo`, with the same unequal clients."""
    training = {"learning_rate": 0.1, "batch_size": 50, "epochs": 5, **changes}
    return make_task(
        "digits", clients=clients, partition="dirichlet(0.1)", model=model, training=training
    )


TASKS: dict[str, Callable[..., Task]] = {
    "mlp": mlp_task,
    "cnn": cnn_task,
    "logistic": logistic_task,
    "resnet20": resnet_task,
    "digits_mlp": partial(digits_task, "mlp(hidden=[64, 64])"),
    "digits_mlp_clip": partial(digits_task, "mlp(hidden=[64, 64])", clip=1.0),
    "digits_mlp_adam": partial(digits_task, "mlp(hidden=[64, 64])", optimizer="adam"),
    "digits_mlp200": partial(digits_task, "mlp"),
    "digits_cnn": partial(digits_task, "digits_cnn"),
    "digits_logistic": partial(digits_task, "logistic"),
}


class Cost(NamedTuple):
    """The cost of a round: wall-clock seconds, and seconds of all processors together."""

    clock: float
    processors: float


def bare_cost(module: nn.Module, task: Task) -> Cost:
    """Run one round's SGD steps on one bare module.

    Loading the start model and gathering batches are not counted.
    """
    settings = task.training
    optimizer = torch.optim.SGD(
        module.parameters(), lr=settings.learning_rate, momentum=settings.momentum
    )
    clock = processors = 0.0
    for client in range(task.clients):
        task.layout.load(module, task.initial)
        samples = task.samples(client)
        batches = []
        for _ in range(settings.epochs):
            order = torch.randperm(len(samples))
            inputs, labels = samples.inputs[order], samples.labels[order]
            size = settings.batch_size or len(order)
            batches += list(zip(inputs.split(size), labels.split(size), strict=True))
        began, used = time.perf_counter(), time.process_time()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
        clock += time.perf_counter() - began
        processors += time.process_time() - used
    return Cost(clock, processors)


def serve(name: str, clients: int) -> None:
    """Run a round of bare steps for every input line, and print its cost."""
    task = TASKS[name](clients)
    module = copy.deepcopy(task.model)
    for _ in sys.stdin:
        print(*bare_cost(module, task), flush=True)


class BareProcess:
    """The bare steps in a separate process.

    The allocator and the threads of this process do not affect them.
    """

    def __init__(self, name: str, clients: int, tuned: bool) -> None:
        command = [sys.executable, __file__, "--serve", "--tasks", name, "--clients", str(clients)]
        command += ["--threads", str(torch.get_num_threads()), *(["--keep-pages"] if tuned else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def round(self) -> Cost:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        clock, processors = map(float, self.process.stdout.readline().split())
        return Cost(clock, processors)

    def close(self) -> None:
        self.process.communicate()


def processor_seconds(engine: object) -> float:
    """Return the processor time of this process and the engine's workers, in seconds."""
    workers = engine.processes if isinstance(engine, ProcessesEngine) else []
    ticks = 0
    for pid in workers:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure(
    name: str, clients: int, engines: list[str], rounds: int, method: str
) -> list[dict[str, Any]]:
    """Return one row for each engine; the first round of each is a warm-up."""
    task = TASKS[name](clients)
    schedule = Schedule(rounds=rounds + 1, participation=1.0, evaluate_every=rounds + 9)
    usual = Schedule(rounds=300, participation=1.0)
    built = {
        engine: make_engine(engine, task, usual, algorithm=build(method)) for engine in engines
    }
    runs = {engine: Federation(build(method), task, built[engine], schedule) for engine in engines}
    bare, tuned = (BareProcess(name, clients, tuned) for tuned in (False, True))
    plain: list[Cost] = []
    tuned_costs: list[Cost] = []
    taken: dict[str, list[Cost]] = {engine: [] for engine in engines}
    for _ in range(rounds + 1):
        plain.append(bare.round())
        tuned_costs.append(tuned.round())
        for engine, run in runs.items():
            began, used = time.perf_counter(), processor_seconds(built[engine])
            run.step()
            taken[engine].append(
                Cost(time.perf_counter() - began, processor_seconds(built[engine]) - used)
            )
    for engine_object in built.values():
        engine_object.close()
    for process in (bare, tuned):
        process.close()
    return [
        {
            "task": name,
            "method": method,
            "clients": clients,
            "threads": torch.get_num_threads(),
            "engine": engine,
            "chosen": str(built[engine].chosen),
            "bare_s": statistics.median(cost.clock for cost in plain[1:]),
            "tuned_s": statistics.median(cost.clock for cost in tuned_costs[1:]),
            "round_s": statistics.median(cost.clock for cost in costs[1:]),
            "ratio": statistics.median(
                c.clock / b.clock for c, b in zip(costs[1:], plain[1:], strict=True)
            ),
            "best_ratio": min(cost.clock for cost in costs[1:])
            / min(cost.clock for cost in plain[1:]),
            "rows_ratio": statistics.median(
                r.clock / c.clock for c, r in zip(costs[1:], taken["rows"][1:], strict=True)
            )
            if "rows" in taken
            else None,
            "cpu_ratio": min(cost.processors for cost in costs[1:])
            / min(cost.processors for cost in plain[1:]),
        }
        for engine, costs in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="rows,stacked,processes,processes(inside=stacked)",
                        help=f"of {', '.join(entry.name for entry in engines)}, with options in brackets")  # fmt: skip
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--methods", default="fedavg", help="expressions, separated by ;")
    parser.add_argument("--clients", default="10,100")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--serve", action="store_true", help="be the process that runs bare steps")
    parser.add_argument("--keep-pages", action="store_true", help="tune its allocator")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.serve:
        if arguments.keep_pages:
            keep_pages()
        serve(arguments.tasks, int(arguments.clients))
        return
    keep_pages()
    rows = []
    for name in arguments.tasks.split(","):
        for clients, method in product(
            map(int, arguments.clients.split(",")), arguments.methods.split(";")
        ):
            rows += measure(
                name,
                clients,
                re.split(r",(?![^(]*\))", arguments.engines),
                arguments.rounds,
                method,
            )
    tell("round in each engine over the bare steps", rows)


if __name__ == "__main__":
    main()
