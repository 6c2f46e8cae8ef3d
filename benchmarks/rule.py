"""Compare the rule's choice of an engine with all engines, on twelve workloads.

    python benchmarks/rule.py [--threads 1,2] [--workloads mlp,logistic] [--rounds 5]

The workloads run with one and with two threads. All engines take every round in turn, after a
warm-up. Seconds are medians of the rounds: processor time with one thread, since other work on the
machine hardly affects it, and wall-clock time otherwise. `over` is the choice's median over the
fastest engine's. The rule is as good as a trial if no row has more than 1.1. Stacks are excluded if
clients cannot train together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engines import cnn_task, digits_task, logistic_task, mlp_task, random_task, resnet_task
from fedloom.algorithm.method import components
from fedloom.common.device import keep_pages
from fedloom.engines.choose import make_engine
from fedloom.engines.rule import choice
from fedloom.engines.stacked import unstackable_method
from fedloom.engines.work import most_workers, step_threads, using_threads
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import tell

COLUMNS = ("rows_s", "stacked_s", "processes_s", "stacked_processes_s")
ROUNDS = 300
"""Number of rounds for the rule."""


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(inputs)[0][:, -1])
        return logits


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(inputs).mean(1))
        return logits


class LowRank(nn.Module):
    """A frozen layer with a trained difference of rank 4, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(256, 256).requires_grad_(False)
        self.down, self.up = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)
        self.head = nn.Linear(256, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.base(inputs) + self.up(self.down(inputs))))
        return logits


def table_task() -> Task:
    return make_task(
        "breast_cancer", clients=10, partition="dirichlet(0.5)", model="mlp(hidden=[32])"
    )


WORKLOADS: dict[str, tuple[Callable[[], Task], str, float]] = {
    # name: (task, method, share of the clients in a round)
    "mlp": (partial(mlp_task, 10), "fedavg", 1.0),
    "demo": (partial(digits_task, "mlp(hidden=[64, 64])", 20), "fedavg", 0.5),
    "logistic": (partial(logistic_task, 30), "fedavg", 1.0),
    "cnn": (partial(cnn_task, 4, 100), "fedavg", 1.0),
    "resnet20": (partial(resnet_task, 4, 50), "fedavg", 1.0),
    "lstm": (lambda: random_task(Lstm(), (20, 16), 10, 100, batch_size=10), "fedavg", 1.0),
    "transformer": (
        lambda: random_task(Encoder(), (20, 16), 10, 100, batch_size=10),
        "fedavg",
        1.0,
    ),
    "lora": (lambda: random_task(LowRank(), (256,), 10, 200, batch_size=20), "fedavg", 1.0),
    "femnist_cnn": (
        lambda: random_task("mcmahan_cnn", (1, 28, 28), 4, 40, batch_size=10),
        "fedavg",
        1.0,
    ),
    "2nn_1000": (
        lambda: random_task("mcmahan_2nn", (784,), 1000, 60, batch_size=10),
        "fedavg",
        0.1,
    ),
    "table": (table_task, "fedavg", 1.0),
    "dp_sgd": (
        partial(digits_task, "mlp(hidden=[64, 64])", 10),
        "dp_sgd(fedavg, clip=1, noise=1)",
        1.0,
    ),
}


def engines_of(method: str) -> list[str]:
    """Return the engines without workers that train clients of a method."""
    stacks = unstackable_method(components(build(method))) is None
    return ["rows", "stacked"] if stacks else ["rows"]


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of a round in each engine, and the choice."""
    make, method, participation = WORKLOADS[name]
    task = make()
    schedule = Schedule(ROUNDS, participation, evaluate_every=ROUNDS)
    chosen = choice(task, schedule, False, build(method))[0].name
    workers = f"workers={most_workers(task, schedule)}"
    names = {engine: f"{engine}_s" for engine in engines_of(method)}
    if torch.get_num_threads() > 1:
        names[f"processes({workers})"] = "processes_s"
        if "stacked" in names:
            names[f"processes({workers}, inside=stacked)"] = "stacked_processes_s"
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    engines = [make_engine(engine, task, schedule) for engine in names]
    runs = [Federation(build(method), task, engine, schedule) for engine in engines]
    turns: list[list[float]] = []
    with using_threads(step_threads(task)):
        for _ in range(rounds + 1):
            turns += [[seconds_of(run, clock) for run in runs]]
    for engine in engines:
        engine.close()
    medians = dict(zip(names, map(statistics.median, zip(*turns[1:], strict=True)), strict=True))
    row = {
        "workload": name,
        "threads": torch.get_num_threads(),
        "choice": chosen,
        "over": medians[chosen] / min(medians.values()),
        **dict.fromkeys(COLUMNS),
        **{column: medians[engine] for engine, column in names.items()},
    }
    print(*row.values(), flush=True)
    return row


def seconds_of(run: Federation, clock: Callable[[], float]) -> float:
    began = clock()
    run.step()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    keep_pages()
    rows = []
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        rows += [measure(name, arguments.rounds) for name in arguments.workloads.split(",")]
    tell("the rule's engine over the fastest", rows)


if __name__ == "__main__":
    main()
