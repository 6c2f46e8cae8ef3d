"""Measure time and memory of a round with a thousand to a million registered clients.

`--participants` of them take part in a round. The models are logistic regression, `--model mlp`
(784-200-200-10, 199,210 weights) and `--model resnet18` (11.2 million, on 8 x 8 pixels). The data
are random, with 10 samples per client in ranges of the indices; clients share samples beyond a
million in total. Each number of clients runs in a separate process, so that its peak memory is
separate. `data_mb` is the memory of samples and partition. `peak_mb` is the peak of the process
above its memory before the task was made. SCAFFOLD, with a memory of one model per client, runs
beside FedAvg.

    python benchmarks/scale.py [--rounds 20] [--clients 1000,10000,100000,1000000]
    python benchmarks/scale.py --model mlp --clients 1000000 --participants 100,1000,10000
        --rounds 2
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from itertools import product

import numpy as np
import torch
from torch import nn

from fedloom.data import Dataset, Partition, Samples
from fedloom.engines.choose import make_engine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation, Schedule
from fedloom.task.making import make_task
from outcome import tell

SAMPLES, POOL = 10, 1 << 25
"""Samples of a client, and maximum number of input values in all samples (128 MiB). Above it,
clients share samples.
"""

MODELS = {"logistic": ((20,), 2), "mlp": ((784,), 10), "resnet18": ((3, 8, 8), 10)}
"""Shape of a sample and classes."""


def peak() -> float:
    """Return the peak memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(
    method: str, model: str, engine: str, clients: int, participants: int, rounds: int
) -> dict[str, str | int | float]:
    """Run one method with `clients` clients, in this process."""
    shape, classes = MODELS[model]
    features = math.prod(shape)
    torch.set_num_threads(1)
    imported = peak()
    began = time.perf_counter()
    draw = torch.Generator().manual_seed(0)
    total = min(clients * SAMPLES, max(POOL, 100 * features) // features)
    train = Samples(
        torch.randn(total, *shape, generator=draw), torch.randint(classes, (total,), generator=draw)
    )
    partition = Partition.from_sizes(
        np.arange(clients * SAMPLES) % total, np.full(clients, SAMPLES)
    )
    task = make_task(
        Dataset("random", train, train[:100], classes),
        partition=partition,
        model=nn.Linear(features, classes) if model == "logistic" else model,
        training={"learning_rate": 0.01, "batch_size": 10},
    )
    seconds_made = time.perf_counter()
    schedule = Schedule(
        rounds=rounds + 1, participation=participants / clients, evaluate_every=rounds + 9
    )
    federation = Federation(build(method), task, make_engine(engine, task), schedule)
    federation.step()
    started = time.perf_counter()
    for _ in range(rounds - 1):
        federation.step()
    data = (
        sum(
            array.nbytes
            for array in (train.inputs, train.labels, partition.indices, partition.offsets)
        )
        / 1e6
    )
    later = [timing["seconds"] for timing in federation.timings[1:] or federation.timings]
    return {
        "method": method,
        "clients": clients,
        "participants": federation._first.participants,
        "make_task_s": seconds_made - began,
        "begin_s": started - seconds_made - federation.timings[0]["seconds"],
        "first_round_s": federation.timings[0]["seconds"],
        "round_s": statistics.median(later),
        "data_mb": data,
        "peak_mb": peak() - imported,
        "over_data_mb": peak() - imported - data,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", default="1000,10000,100000,1000000")
    parser.add_argument("--methods", default="fedavg,scaffold")
    parser.add_argument("--model", choices=MODELS, default="logistic")
    parser.add_argument("--engine", default="rows")
    parser.add_argument("--participants", default="100")
    parser.add_argument(
        "--alone",
        action="store_true",
        help="measure one method with one number of clients, in this process",
    )
    arguments = parser.parse_args()
    if arguments.alone:
        measurement = measure(
            arguments.methods,
            arguments.model,
            arguments.engine,
            int(arguments.clients),
            int(arguments.participants),
            arguments.rounds,
        )
        print(json.dumps(measurement))
        return
    rows = []
    lines = product(
        *(
            text.split(",")
            for text in (arguments.methods, arguments.clients, arguments.participants)
        )
    )
    for method, clients, participants in lines:
        command = [sys.executable, __file__, "--alone", "--methods", method, "--clients", clients]
        command += ["--participants", participants, "--rounds", str(arguments.rounds)]
        command += ["--model", arguments.model, "--engine", arguments.engine]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
    tell(f"{arguments.model}: registered clients and participants, engine {arguments.engine}", rows)


if __name__ == "__main__":
    main()
