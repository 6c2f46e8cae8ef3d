"""What idle clients cost: a round's time and the memory, from a thousand registered clients to a million.

Logistic regression on random data of 20 features, 10 samples a client in ranges of the indices, 100 clients a round. Each
number of clients runs in a process of its own, so that its peak of memory is its own. `data_mb` is what samples and partition
need by themselves; `peak_mb` is the most the process held above what it held before the task was made. A method that has
clients remember as much as a model, SCAFFOLD, runs beside FedAvg.

    python benchmarks/scale.py [--rounds 20] [--clients 1000,10000,100000,1000000]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
from torch import nn

from fedloom.algorithm import build
from fedloom.data import Dataset, Partition, Samples
from fedloom.engines.rows import RowsEngine
from fedloom.rounds.federation import Federation, Schedule
from fedloom.task import make_task
from outcome import tell

FEATURES, CLASSES, SAMPLES, PARTICIPANTS = 20, 2, 10, 100


def peak() -> float:
    """The most memory that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(method: str, clients: int, rounds: int) -> dict[str, str | int | float]:
    """One method with so many clients, in this process."""
    torch.set_num_threads(1)
    before = peak()
    began = time.perf_counter()
    draw = torch.Generator().manual_seed(0)
    total = clients * SAMPLES
    train = Samples(torch.randn(total, FEATURES, generator=draw), torch.randint(CLASSES, (total,), generator=draw))
    partition = Partition.from_sizes(np.arange(total), np.full(clients, SAMPLES))
    task = make_task(
        Dataset("random", train, train[:100], CLASSES),
        partition=partition,
        model=nn.Linear(FEATURES, CLASSES),
        training={"learning_rate": 0.01, "batch_size": 10},
    )
    made = time.perf_counter()
    schedule = Schedule(rounds=rounds + 1, participation=PARTICIPANTS / clients, evaluate_every=rounds + 9)
    federation = Federation(build(method), task, RowsEngine(task), schedule)
    federation.step()
    started = time.perf_counter()
    for _ in range(rounds - 1):
        federation.step()
    data = sum(array.nbytes for array in (train.inputs, train.labels, partition.indices, partition.offsets)) / 1e6
    later = [timing["seconds"] for timing in federation.timings[1:]]
    return {
        "method": method,
        "clients": clients,
        "participants": federation._first.participants,
        "make_task_s": made - began,
        "begin_s": started - made - federation.timings[0]["seconds"],
        "first_round_s": federation.timings[0]["seconds"],
        "round_s": statistics.median(later),
        "data_mb": data,
        "peak_mb": peak() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", default="1000,10000,100000,1000000")
    parser.add_argument("--methods", default="fedavg,scaffold")
    parser.add_argument(
        "--alone", action="store_true", help="measure one method with one number of clients, in this process"
    )
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(measure(arguments.methods, int(arguments.clients), arguments.rounds)))
        return
    rows = []
    for method in arguments.methods.split(","):
        for clients in arguments.clients.split(","):
            command = [sys.executable, __file__, "--alone", "--methods", method, "--clients", clients]
            command += ["--rounds", str(arguments.rounds)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout))
    tell(f"registered clients, {PARTICIPANTS} taking part", rows)


if __name__ == "__main__":
    main()
