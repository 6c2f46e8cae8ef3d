"""Processor seconds and memory of a round's exchange, with one training step per client.

    python benchmarks/exchange.py [--clients 10,1500] [--methods fedavg,fedmr,scaffold]
        [--rounds 5]
    PYTHONPATH=OTHER/src python benchmarks/exchange.py  # the same of another checkout, to compare

The second command measures another checkout for comparison. A separate process measures each line:
the minimum processor seconds of a round after the first, with every reply and with a tenth of the
clients dropping out, and the peak memory above imports and data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import product
from typing import Any

import torch

import fedloom as fl
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from memory import imports, peak
from outcome import tell


def measure(method: str, clients: int, dropout: float, rounds: int) -> dict[str, Any]:
    """Return the cost of the rounds of one method in this process."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (
        torch.randn(2 * clients, 784, generator=generator),
        torch.arange(2 * clients) % 10,
    )
    task = fl.make_task(
        fl.Dataset("drawn", fl.Samples(inputs, labels), fl.Samples(inputs[:10], labels[:10]), 10),
        clients=clients,
        partition="iid",
        model="mlp(hidden=[64])",
        training=fl.Training(learning_rate=0.01, batch_size=2),
    )
    imported = imports()
    schedule = Schedule(
        rounds=rounds + 9, participation=1.0, evaluate_every=rounds + 9, dropout=dropout
    )
    federation = Federation(build(method), task, RowsEngine(task), schedule)
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        federation.step()
        seconds.append(time.process_time() - began)
    return {
        "method": method,
        "clients": clients,
        "dropout": dropout,
        "round_s": min(seconds[1:]),
        "models_mb": clients * task.initial.nbytes / 1e6,
        "over_mb": peak() - imported,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", default="10,1500")
    parser.add_argument("--methods", default="fedavg,fedmr,scaffold")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", nargs=4, help="measure one line in this process")
    arguments = parser.parse_args()
    if arguments.alone:
        method, clients, dropout, rounds = arguments.alone
        print(json.dumps(measure(method, int(clients), float(dropout), int(rounds))))
        return
    rows = []
    for line in product(arguments.methods.split(","), arguments.clients.split(","), ("0", "0.1")):
        command = [sys.executable, __file__, "--alone", *line, str(arguments.rounds)]
        rows.append(
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        )
    tell("a round's exchange", rows)


if __name__ == "__main__":
    main()
