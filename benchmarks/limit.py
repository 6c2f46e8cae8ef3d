"""Compare the cost of a round with its lower limit, in one run on one machine.

Training: seconds of a FedAvg round against the same SGD steps on one bare module with one torch
optimizer. The bare module gets each client's start model and the same batches, gathered in advance.
Only its steps are timed. The two are timed in turn, client by client of the same round. Server:
recombination and averaging of models against copying the same bytes.

    python benchmarks/limit.py [--rounds 7] [--models 100] [--threads 1,2]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.device import keep_pages
from fedloom.data import Dataset, Partition, Samples
from fedloom.engines.rows import RowsEngine
from fedloom.flat.population import recombine_, weighted_mean
from fedloom.rounds.federation import Federation, Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import tell

CLIENTS = 10


def mlp() -> nn.Module:
    """Return the network 784-200-200-10."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, 10),
    )


def cnn() -> nn.Module:
    """Return conv 5x5 3->32, pool, conv 5x5 32->64, pool, fc 1600-512-10."""
    return nn.Sequential(
        *(
            nn.Conv2d(3, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def random_task(
    model: nn.Module, shape: tuple[int, ...], samples: int, batch_size: int, momentum: float
) -> Task:
    """Return ten clients with `samples` random samples each."""
    draw = torch.Generator().manual_seed(0)
    total = CLIENTS * samples
    train = Samples(
        torch.randn(total, *shape, generator=draw), torch.randint(10, (total,), generator=draw)
    )
    return make_task(
        Dataset("random", train, train[:10], 10),
        partition=Partition.from_sizes(np.arange(total), [samples] * CLIENTS),
        model=model,
        training={"learning_rate": 0.01, "momentum": momentum, "batch_size": batch_size},
    )


def bare_seconds(module: nn.Module, task: Task, start: torch.Tensor) -> float:
    """Return seconds of one round's SGD steps on one bare module, without the model's loading."""
    settings = task.training
    optimizer = torch.optim.SGD(
        module.parameters(), lr=settings.learning_rate, momentum=settings.momentum
    )
    seconds = 0.0
    for client in range(CLIENTS):
        task.layout.load(module, start)
        samples = task.samples(client)
        order = torch.randperm(len(samples))
        inputs_of, labels_of = (
            t[order].split(settings.batch_size or len(order))
            for t in (samples.inputs, samples.labels)
        )
        batches = list(zip(inputs_of, labels_of, strict=True))
        began = time.perf_counter()
        for inputs, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(module(inputs), labels).backward()
            optimizer.step()
        seconds += time.perf_counter() - began
    return seconds


def training(name: str, task: Task, threads: int, rounds: int) -> dict[str, str | int | float]:
    """Return medians over rounds, with both in turn."""
    torch.set_num_threads(threads)
    federation = Federation(
        FedAvg(),
        task,
        RowsEngine(task),
        Schedule(rounds=rounds + 2, participation=1.0, evaluate_every=rounds + 9),
    )
    module = copy.deepcopy(task.model)
    pairs = []
    for _ in range(rounds + 1):
        bare = bare_seconds(module, task, federation.model())
        began = time.perf_counter()
        federation.step()
        pairs.append((bare, time.perf_counter() - began))
    pairs = pairs[1:]  # a warm-up
    return {
        "what": name,
        "threads": threads,
        "limit_s": statistics.median(bare for bare, _ in pairs),
        "ours_s": statistics.median(ours for _, ours in pairs),
        "ratio": statistics.median(ours / bare for bare, ours in pairs),
        "best_ratio": min(ours / bare for bare, ours in pairs),
    }


def server(models: int, threads: int, repeats: int) -> list[dict[str, str | int | float]]:
    """Measure recombination in place and averaging against copying the same bytes.

    The models have 15 M parameters in 32 tensors.
    """
    torch.set_num_threads(threads)
    width = 15_200_000 // 16
    units = [
        unit
        for k in range(16)
        for unit in (
            (slice(k * width, (k + 1) * width - 512),),
            (slice((k + 1) * width - 512, (k + 1) * width),),
        )
    ]
    pool = torch.randn(models, 16 * width)
    target = torch.empty_like(pool)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(models)
    jobs: dict[str, Callable[[], object]] = {
        "recombine": lambda: recombine_(pool, units, generator),
        "mean": lambda: weighted_mean(pool),
        "weighted mean": lambda: weighted_mean(pool, weights),
    }
    target.copy_(pool)
    rows: list[dict[str, str | int | float]] = []
    for name, job in jobs.items():
        pairs = [(_seconds(lambda: target.copy_(pool)), _seconds(job)) for _ in range(repeats)]
        rows.append({
            "what": f"{name}, {models} x {16 * width / 1e6:.1f} M",
            "threads": threads,
            "limit_s": statistics.median(copied for copied, _ in pairs),
            "ours_s": statistics.median(ours for _, ours in pairs),
            "ratio": statistics.median(ours / copied for copied, ours in pairs),
            "best_ratio": min(ours / copied for copied, ours in pairs),
        })  # fmt: skip
    return rows


def _seconds(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--models", type=int, default=100, help="models on the server (100 need 12 GB)"
    )
    parser.add_argument("--threads", default="1,2")
    parser.add_argument(
        "--eager-allocator", action="store_true", help="leave the C library's allocator as it comes"
    )
    arguments = parser.parse_args()
    if not arguments.eager_allocator:
        keep_pages()
    rows = []
    for threads in map(int, arguments.threads.split(",")):
        rows.append(
            training(
                "MLP b=10", random_task(mlp(), (784,), 600, 10, 0.0), threads, arguments.rounds
            )
        )
        rows.append(
            training(
                "CNN b=50", random_task(cnn(), (3, 32, 32), 500, 50, 0.9), threads, arguments.rounds
            )
        )
    rows += server(arguments.models, max(map(int, arguments.threads.split(","))), arguments.rounds)
    tell("round over the bare steps; server work over a copy", rows)


if __name__ == "__main__":
    main()
