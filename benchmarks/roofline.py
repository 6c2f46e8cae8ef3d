"""Measure the share of the machine's peak in a round of FedAvg.

Multiply-adds are compared with a large product, bytes with a copy.

    python benchmarks/roofline.py [--engines rows,stacked] [--tasks mlp,cnn] [--clients 10]
        [--rounds 8] [--threads 1]

- `gflop_s`: matrix products and convolutions, with two operations per multiply-add.
- `gb_s`: bytes of the weights. Each step reads them forward and backward, and reads and writes them
  in the update; with momentum, also the velocity.
- `product_gflop_s`: a product of two matrices of 2048 x 2048.
- `copy_gb_s`: a copy with the size of all weights that train together. It is in the caches if these
  weights are.

The first two are from the fastest round's training. The last two are the best measurements between
the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from engines import TASKS
from fedloom.engines.choose import make_engine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.work import mean_steps, step_multiply_adds
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from outcome import tell


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(engine_name: str, task_name: str, clients: int, rounds: int) -> dict[str, Any]:
    """Return one line of the table."""
    task = TASKS[task_name](clients)
    engine = make_engine(engine_name, task)
    assert isinstance(engine, RowsEngine)
    matrix = torch.randn(2048, 2048)
    weights = torch.randn(min(engine.chunk, clients), task.layout.size)
    copy = weights.clone()
    products: list[float] = []
    copies: list[float] = []

    def peaks(*_: Any) -> None:
        products.append(seconds(lambda: matrix @ matrix))
        copies.extend(seconds(lambda: copy.copy_(weights)) for _ in range(20))

    federation = Federation(
        build("fedavg"), task, engine, Schedule(rounds, 1.0, evaluate_every=rounds)
    )
    federation.run(peaks)
    training = min(timing["train_seconds"] for timing in federation.timings[1:])
    steps = clients * mean_steps(task)
    gflop_s = 2e-9 * steps * step_multiply_adds(task) / training
    gb_s = 1e-9 * steps * task.layout.row_bytes * (6 if task.training.momentum else 4) / training
    product, copied = 2e-9 * 2048**3 / min(products), 2e-9 * weights.nbytes / min(copies)
    return {
        "engine": engine_name,
        "task": f"{clients} x {task_name}",
        "train_s": training,
        "gflop_s": gflop_s,
        "product_gflop_s": product,
        "share": gflop_s / product,
        "gb_s": gb_s,
        "copy_gb_s": copied,
        "bytes_share": gb_s / copied,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="rows,stacked")
    parser.add_argument("--tasks", default="mlp,cnn")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tell("Share of the machine's peak that a round of FedAvg reaches", [
        measure(engine, task, arguments.clients, arguments.rounds)
        for task in arguments.tasks.split(",") for engine in arguments.engines.split(",")
    ])  # fmt: skip


if __name__ == "__main__":
    main()
