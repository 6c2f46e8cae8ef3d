"""Does it matter whether FedAvg averages the statistics of batch norm? CIFAR-10, a small CNN.

PFLlib averages `parameters()` only, so the running means and variances of batch norm stay with each
client (its issues 259 and 260). This script compares the three choices: `fedavg` averages
statistics too, `silobn` keeps them at the clients (PFLlib's FedAvg), and `fedbn` keeps whole
batch-norm layers there. `fedavg, group norm` has no statistics.

20 clients, all in each round, one epoch of SGD with batch size 20, 3,000 images, a quarter of each
client's images for tests. `clients`: accuracy of each client's model on its own test images, over
all images, before local training. `global`: the server's model on the global test set, only for
methods that have such a model.

    # each finished run adds one line to the record
    python benchmarks/batch_norm.py --cifar FOLDER [--rounds 40] [--seeds 3]
    python benchmarks/batch_norm.py --tables  # only print
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.common.randomness import stream
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, make_dataset
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task.making import make_task
from outcome import append, finished_runs, tell

CLIENTS = 20
IMAGES = 3000
PARTITIONS = ("iid", "dirichlet(0.1)", "pathological(2)")
METHODS = {
    "fedavg": "fedavg",
    "silobn": "silobn",
    "fedbn": "fedbn",
    "fedavg, group norm": "fedavg",
}
RECORD = Path(__file__).parent / "records" / "batch_norm.jsonl.gz"


class Run(NamedTuple):
    """A method with a partition, a number of rounds and a seed."""

    method: str
    partition: str
    rounds: int
    seed: int


class SmallCNN(nn.Module):
    """Three convolutions with normalisation and pooling, and a linear classifier."""

    head = "linear"

    def __init__(self, groups: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 8), (8, 16), (16, 16)):
            norm = nn.GroupNorm(4, outputs) if groups else nn.BatchNorm2d(outputs)
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)]
        self.body = nn.Sequential(*layers, nn.Flatten())
        self.linear = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(self.body(x))
        return outputs


def measure(run: Run, dataset: Dataset) -> dict[str, Any]:
    """Make a run; return it as a line of the record."""
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        model = SmallCNN(groups="group" in run.method)
    task = make_task(
        dataset,
        clients=CLIENTS,
        partition=run.partition,
        model=model,
        seed=run.seed,
        training=Training(learning_rate=0.05, batch_size=20),
        local_test=0.25,
    )
    schedule = Schedule(run.rounds, 1.0, seed=run.seed, evaluate_every=5, personal_every=5)
    began = time.process_time()
    federation = Federation(build(METHODS[run.method]), task, RowsEngine(task), schedule)
    federation.run()
    records = [record for record in federation.history if "personal_accuracy" in record]
    return {
        **run._asdict(),
        "clients": [round(record["personal_accuracy"], 4) for record in records],
        "global": [round(record["accuracy"], 4) for record in records if "accuracy" in record],
        "processor_seconds": round(time.process_time() - began, 1),
    }


def runs(rounds: int, seeds: int) -> Iterator[Run]:
    """Yield all runs, seed by seed."""
    for seed in range(seeds):
        for partition in PARTITIONS:
            for method in METHODS:
                yield Run(method, partition, rounds, seed)


def spread(values: Sequence[float]) -> str:
    """Return mean and deviation over the seeds, in %."""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{deviation}"


def table(lines: Sequence[dict[str, Any]]) -> None:
    """Print a row for each partition and method: the last evaluation, and the best."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["partition"], line["method"]), []).append(line)
    rows = []
    for (partition, method), seeds in groups.items():
        whole = [line["global"][-1] for line in seeds if line["global"]]
        rows.append(
            {
                "partition": partition,
                "method": method,
                "seeds": len(seeds),
                "clients": spread([line["clients"][-1] for line in seeds]),
                "best": spread([max(line["clients"]) for line in seeds]),
                "global": spread(whole) if whole and method.startswith("fedavg") else "-",
            }
        )
    if rows:
        tell("Statistics of batch norm: averaged or not, CIFAR-10, accuracy in %", rows)


def subset(dataset: Dataset) -> Dataset:
    """Return the data with a fixed random subset of the training images."""
    chosen = torch.randperm(len(dataset.train), generator=stream(0, "images"))[:IMAGES]
    return replace(dataset, train=dataset.train[chosen])


def main() -> None:
    """Make the missing runs, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar", help="folder with CIFAR-10")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", action="store_true", help="print the record, run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = {Run(*(line[name] for name in Run._fields)): line for line in finished_runs(RECORD)}
    missing = [run for run in runs(arguments.rounds, arguments.seeds) if run not in done]
    if missing and not arguments.tables:
        dataset = subset(make_dataset(f"cifar10(folder={arguments.cifar!r})"))
        for run in missing:
            done[run] = measure(run, dataset)
            append(RECORD, done[run])
            line = done[run]
            print(f"{run}: {line['clients'][-1]} in {line['processor_seconds']} s", flush=True)
    table(list(done.values()))


if __name__ == "__main__":
    main()
