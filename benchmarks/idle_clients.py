"""Measure FedUmf's savings when only the necessary idle clients train.

These are the idle clients that the next round selects; the results are equal bit for bit. With 10 %
of 100 clients in a round, every round could train 90 idle clients and needs about 9.

    python benchmarks/idle_clients.py [--rounds 20] [--clients 100] [--participation 0.1]
        [--model mlp]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import tell


class Counting(RowsEngine):
    """Counts the clients that train."""

    trained = 0

    def train(self, pipeline, round, jobs):  # type: ignore[no-untyped-def]
        self.trained += len(jobs)
        return super().train(pipeline, round, jobs)


def measure(expression: str, task: Task, schedule: Schedule) -> tuple[dict[str, Any], torch.Tensor]:
    """Return one row of the table, and the final model."""
    engine = Counting(task)
    run = Federation(build(expression), task, engine, schedule)
    began = time.perf_counter()
    run.run()
    seconds = (time.perf_counter() - began) / schedule.rounds
    accuracy = run.history[-1]["accuracy"]
    row = {
        "method": expression,
        "trained_a_round": engine.trained / schedule.rounds,
        "seconds_a_round": seconds,
    }
    return row | {"accuracy": accuracy}, run.model()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--participation", type=float, default=0.1)
    parser.add_argument("--model", default="mlp")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = make_task(
        "digits",
        clients=arguments.clients,
        partition="iid",
        model=arguments.model,
        training={"batch_size": 5},
    )
    schedule = Schedule(rounds=arguments.rounds, participation=arguments.participation)
    rows, models = [], []
    for expression in ("fedavg", "umf(fedavg, simulate_all=true)", "umf(fedavg)"):
        row, model = measure(expression, task, schedule)
        rows.append(row)
        models.append(model)
    equal = torch.equal(models[1], models[2])
    for row, value in zip(rows, (None, equal, equal), strict=True):
        row["same_model"] = value
        row["time_of_all_idle"] = row["seconds_a_round"] / rows[1]["seconds_a_round"]
    tell("FedUmf with the idle clients that matter", rows)
    if not equal:
        raise SystemExit("the two simulations of FedUmf differ")


if __name__ == "__main__":
    main()
