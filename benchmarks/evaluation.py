"""Measure the cost of evaluation at the default cadence, and the gain of one pass over all
clients.

The three federations have clients with their own test data: a small one with every client in each
round, one with few of many clients, and one of convolutional nets. Each runs with plain averaging
and with the most expensive kind of personalisation, one more local training before use. The share
is seconds of evaluation over seconds of the run, from the run's own timings.

    python benchmarks/evaluation.py [--cadences 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.algorithm.records import Message
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.device import keep_pages
from fedloom.data import Dataset, Samples
from fedloom.engines.rows import RowsEngine
from fedloom.local.cohort import Cohort
from fedloom.rounds.evaluation import Evaluation
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.rounds.scoring import Evaluator
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import tell


@dataclass
class FineTuned(FedAvg):
    """Every client trains the global model once more before use."""

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        return cohort.fit(inbox["model"]).model


def images(count: int, channels: int, size: int) -> Dataset:
    """Return random images and labels; the global test set is a tenth of the size."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randint(
        256, (count + count // 10, channels, size, size), generator=draw, dtype=torch.uint8
    )
    everything = Samples(inputs, torch.randint(10, (len(inputs),), generator=draw))
    means = (0.5,) * channels
    return Dataset("random", everything[:count], everything[count:], 10, means, means)


def federations() -> list[tuple[str, Task, float]]:
    """Return name, task and participation of each federation."""
    sgd = {"learning_rate": 0.005, "batch_size": 10}
    return [
        (
            "digits, mlp, 20 clients, all take part",
            make_task(
                "digits",
                clients=20,
                partition="dirichlet(0.5)",
                model="mlp",
                training=sgd,
                local_test=0.25,
            ),
            1.0,
        ),
        (
            "28x28, mlp, 100 clients, a tenth takes part",
            make_task(
                images(4_000, 1, 28),
                clients=100,
                partition="iid",
                model="mlp",
                training=sgd,
                local_test=0.25,
            ),
            0.1,
        ),
        (
            "28x28, cnn4, 20 clients, all take part",
            make_task(
                images(600, 1, 28),
                clients=20,
                partition="iid",
                model="cnn4",
                training=sgd,
                local_test=0.25,
            ),
            1.0,
        ),
    ]


def share(algorithm: Algorithm, task: Task, participation: float, cadences: int) -> dict[str, Any]:
    """Make one run over `cadences` evaluations of the clients."""
    probe = Evaluation(task, RowsEngine(task), Schedule(1, participation), task.clients)
    schedule = Schedule(cadences * probe.personal_every, participation, checkpoint_every=10_000)
    run = Federation(algorithm, task, RowsEngine(task), schedule)
    run.run()
    total = sum(timing["seconds"] for timing in run.timings)
    spent = sum(timing["evaluate_seconds"] for timing in run.timings)
    return {
        "method": type(algorithm).__name__,
        "global_every": probe.every,
        "clients_every": probe.personal_every,
        "rounds": schedule.rounds,
        "seconds": total,
        "evaluation_share": spent / total,
    }


def pass_seconds(task: Task, repeats: int = 5) -> dict[str, float]:
    """Return median milliseconds over turns.

    They are for the global model on all clients' test data, in one pass and client by client, and
    for one personal model per client.
    """
    evaluator = Evaluator(task.model, task.layout, task.dataset)
    local_test = task.local_test
    assert local_test is not None  # every task here has it
    clients = range(task.clients)
    rows = task.initial + 0.01 * torch.randn(task.clients, task.layout.size)
    ways: dict[str, Callable[[], object]] = {
        "together_ms": lambda: evaluator.tally(task.initial, task.train, local_test, clients),
        "apart_ms": lambda: [
            evaluator.tally(task.initial, task.train, local_test, [client]) for client in clients
        ],
        "models_apart_ms": lambda: [
            evaluator.tally(rows[k], task.train, local_test, [k]) for k in clients
        ],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name].append(1000 * (time.process_time() - began))
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Measure all federations and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--cadences", type=int, default=2, help="how many evaluations of the clients a run lasts"
    )
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    keep_pages()
    shares: list[dict[str, Any]] = []
    passes: list[dict[str, Any]] = []
    for name, task, participation in federations():
        methods = (FedAvg(), FineTuned())
        shares += [
            {"federation": name, **share(method, task, participation, chosen.cadences)}
            for method in methods
        ]
        passes.append({"federation": name, **pass_seconds(task)})
    tell("One evaluation on the clients' own test data", passes)
    tell("Share of evaluation in a run", shares)


if __name__ == "__main__":
    main()
