"""Measure traffic and computing time of a round of each method, for FedMR's appendix C.1.

K clients take part. The paper counts 2K models for FedAvg, FedProx, CluSamp, FedMR and the later
baselines. It counts 2K models and 2K control variates (with the size of the model's trainable part)
for SCAFFOLD, and 2K models and K generators for FedGen. The script counts the bytes of the last of
a few rounds, in units of one model. FedGen sends no generator in the first round. Its clients
return a count for each class, which the paper omits. Times are medians over the rounds after the
first, in milliseconds: a client's whole turn, and the server's half of the round.

    python benchmarks/communication.py [--rounds 5] [--clients 20] [--participation 0.5]
        [--data digits] [--model mlp]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from fedloom.algorithm import algorithms
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import tell

BASELINES = (
    "fedavg",
    "fedprox",
    "moon",
    "clusamp",
    "fedexp",
    "fedasam",
    "fedmut",
    "indep",
    "fedmr",
)
"""Methods that exchange only one model down and one model up with each client."""


def in_the_paper(name: str, method: Federation, participants: int) -> tuple[str, float]:
    """Return the traffic by appendix C.1, as text and in multiples of one model's size."""
    layout = method.task.layout
    if name == "scaffold":
        return "2K models + 2K variates", 2 * participants * (1 + layout.trainable / layout.size)
    if name == "fedgen":
        generator = method.server_state()["generator"].numel()
        return "2K models + K generators", participants * (2 + generator / layout.size)
    return "2K models", 2.0 * participants


def measure(name: str, task: Task, schedule: Schedule) -> dict[str, Any]:
    """Return one row of the table."""
    run = Federation(build(name), task, RowsEngine(task), schedule)
    run.run()
    record = run.history[-1]
    participants = len(record["clients"])  # CluSamp trains a client that it draws twice only once
    words, expected = in_the_paper(name, run, participants)
    size = task.layout.size * task.initial.element_size()
    timings, records = run.timings[1:], run.history[1:]
    turns = [t["train_seconds"] / len(r["clients"]) for t, r in zip(timings, records, strict=True)]
    return {
        "method": name,
        "K": participants,
        "paper": words,
        "in_paper": expected,
        "down": record["bytes_down"] / size,
        "up": record["bytes_up"] / size,
        "counted": (record["bytes_down"] + record["bytes_up"]) / size,
        "client_ms": 1000 * statistics.median(turns),
        "server_ms": 1000 * statistics.median(t["server_seconds"] for t in timings),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--participation", type=float, default=0.5)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="mlp")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = make_task(
        arguments.data, clients=arguments.clients, partition="iid", model=arguments.model
    )
    schedule = Schedule(rounds=max(2, arguments.rounds), participation=arguments.participation)
    names = [name for name in (*BASELINES, "scaffold", "fedgen") if name in algorithms]
    tell("a round's traffic and computing time", [measure(name, task, schedule) for name in names])


if __name__ == "__main__":
    main()
