"""Seconds of a FedAvg round in each engine over the same SGD steps on one bare module, in one run on one machine.

    python benchmarks/engines.py [--engines rows,stacked] [--tasks mlp,logistic] [--clients 10,100] [--rounds 5] [--threads 2]

Engines and bare steps run in turn, round by round; a ratio is the median over rounds of engine over bare, both of the same round.
The engine `auto` would take, and what its trial measured, stand beside.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedloom.algorithms.fedavg import FedAvg
from fedloom.allocator import keep_pages
from fedloom.data import Dataset, Partition, Samples
from fedloom.engines.choose import ENGINES, make_engine
from fedloom.federation import Federation
from fedloom.schedule import Schedule
from fedloom.task import Task, make_task
from limit import cnn, mlp
from outcome import tell


def random_task(model: str | nn.Module, shape: tuple[int, ...], clients: int, samples: int, **training: Any) -> Task:
    """Clients with `samples` random samples each, of ten classes."""
    draw = torch.Generator().manual_seed(0)
    total = clients * samples
    train = Samples(torch.randn(total, *shape, generator=draw), torch.randint(10, (total,), generator=draw))
    partition = Partition.from_sizes(np.arange(total), [samples] * clients)
    settings = {"learning_rate": 0.01, **training}
    return make_task(Dataset("random", train, train[:10], 10), partition=partition, model=model, training=settings)


def mlp_task(clients: int) -> Task:
    return random_task(mlp(), (784,), clients, 600, batch_size=10)


def cnn_task(clients: int) -> Task:
    return random_task(cnn(), (3, 32, 32), clients, 500, batch_size=50, momentum=0.9)


def resnet_task(clients: int) -> Task:
    return random_task("fedmr_resnet20", (3, 32, 32), clients, 100, batch_size=50, momentum=0.9)


def logistic_task(clients: int) -> Task:
    """FedUmf's and FedDC's synthetic data, whose clients have unequal numbers of samples."""
    return make_task(
        f"synthetic(alpha=1.0, beta=1.0, users={clients})",
        clients=clients,
        partition="natural",
        model="logistic",
        training={"learning_rate": 0.1, "batch_size": 50, "epochs": 5},
    )


TASKS: dict[str, Callable[[int], Task]] = {
    "mlp": mlp_task,
    "cnn": cnn_task,
    "logistic": logistic_task,
    "resnet20": resnet_task,
}


def bare_seconds(module: nn.Module, task: Task) -> float:
    """Seconds of one round's SGD steps on one bare module; loading the start model and gathering batches are not counted."""
    settings = task.training
    optimiser = torch.optim.SGD(module.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    seconds = 0.0
    for client in range(task.clients):
        task.layout.load(module, task.initial)
        samples = task.samples(client)
        batches = []
        for _ in range(settings.epochs):
            order = torch.randperm(len(samples))
            inputs, labels = samples.inputs[order], samples.labels[order]
            size = settings.batch_size or len(order)
            batches += list(zip(inputs.split(size), labels.split(size), strict=True))
        began = time.perf_counter()
        for x, y in batches:
            optimiser.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimiser.step()
        seconds += time.perf_counter() - began
    return seconds


def measure(name: str, clients: int, engines: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row for each engine; the first round of each warms up."""
    task = TASKS[name](clients)
    schedule = Schedule(rounds=rounds + 1, participation=1.0, evaluate_every=rounds + 9)
    made = {engine: make_engine(engine, task) for engine in engines}
    runs = {engine: Federation(FedAvg(), task, made[engine], schedule) for engine in engines}
    module = copy.deepcopy(task.model)
    bare: list[float] = []
    taken: dict[str, list[float]] = {engine: [] for engine in engines}
    for _ in range(rounds + 1):
        bare.append(bare_seconds(module, task))
        for engine, run in runs.items():
            began = time.perf_counter()
            run.step()
            taken[engine].append(time.perf_counter() - began)
    for each in made.values():
        each.close()
    return [
        {
            "task": name,
            "clients": clients,
            "threads": torch.get_num_threads(),
            "engine": engine,
            "chosen": str(made[engine].chosen),
            "bare_s": statistics.median(bare[1:]),
            "round_s": statistics.median(times[1:]),
            "ratio": statistics.median(t / b for t, b in zip(times[1:], bare[1:], strict=True)),
            "best_ratio": min(times[1:]) / min(bare[1:]),
        }
        for engine, times in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="rows,stacked", help=f"of {', '.join((*ENGINES, 'auto'))}")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--clients", default="10,100")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_pages()
    rows = []
    for name in arguments.tasks.split(","):
        for clients in map(int, arguments.clients.split(",")):
            rows += measure(name, clients, arguments.engines.split(","), arguments.rounds)
    tell("round in each engine over the bare steps", rows)


if __name__ == "__main__":
    main()
