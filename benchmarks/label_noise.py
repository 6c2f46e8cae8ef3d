"""Compare averaging and recombination with wrong training labels, on digits and MNIST.

A share of the training labels is replaced; the test set is clean. Twenty clients, ten per round,
400 rounds of 5 local epochs, batch 50, learning rate 0.1, five seeds. MNIST is cut to its first
6,000 training images, 300 per client, with all test images. A finished run adds one line to the
record. A restarted script continues with the missing runs. The most informative runs are first, and
the tables show all finished runs.

    python benchmarks/label_noise.py [--mnist FOLDER] [--record FILE]     # 2 hours of one core
    python benchmarks/label_noise.py --tables                              # only print
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedloom as fl
from fedloom.data import Dataset
from fedloom.data.dataset import make_dataset
from fedloom.recording.round_models import CURVES
from outcome import append, finished_runs

ROUNDS, SEEDS = 400, 5
PARTITIONS = ("dirichlet(1.0)", "dirichlet(0.1)", "iid")
TOLD = ("fedavg", "fedmr", "stages(fedavg:50, fedmr)")
OTHERS = ("fedprox", "fedasam", "fedmut")
CHOSEN = "fedmr(blend='auto')"  # only on MNIST, where the models of plain FedMR's pool diverge
LARGE, SMALL = "mlp(hidden=[128, 128])", "mlp(hidden=[32])"
TRAINING = {"learning_rate": 0.1, "epochs": 5, "batch_size": 50}


class Cell(NamedTuple):
    """One run; `noise` is the share of the training labels that are replaced by uniform ones."""

    data: str
    noise: float
    partition: str
    model: str
    method: str
    seed: int


def plan() -> Iterator[Cell]:
    """Return all runs, the most informative first."""
    for data, model, noises, methods in (
        ("digits", LARGE, (0.4, 0.0), TOLD), ("digits", LARGE, (0.4,), OTHERS), ("mnist", LARGE, (0.4,), TOLD[:2]),
        ("digits", LARGE, (0.0,), OTHERS), ("digits", LARGE, (0.2, 0.6), (*TOLD, *OTHERS)),
        ("digits", SMALL, (0.4, 0.0), (*TOLD, *OTHERS)), ("digits", SMALL, (0.2, 0.6), (*TOLD, *OTHERS)),
        ("mnist", LARGE, (0.4,), (CHOSEN,)),
    ):  # fmt: skip
        for noise, partition, method, seed in product(noises, PARTITIONS, methods, range(SEEDS)):
            yield Cell(data, noise, partition, model, method, seed)


def measure(cell: Cell, data: Dataset) -> dict[str, Any]:
    """Run one cell.

    The accuracy on the test set is measured after every fifth round, on right and wrong training
    labels every 20th.
    """
    task = fl.make_task(
        data,
        clients=20,
        partition=cell.partition,
        model=cell.model,
        training=TRAINING,
        label_noise=f"symmetric({cell.noise})",
        seed=cell.seed,
    )
    began = time.perf_counter()
    result = fl.run(
        cell.method,
        task,
        rounds=ROUNDS,
        participation=0.5,
        seed=cell.seed,
        evaluate_every=5,
        engine="stacked",
        record=["memorisation(every=20)"],
    )
    (learned,) = result.recorded
    return {
        **cell._asdict(),
        "accuracy": [
            round(record["accuracy"], 4) for record in result.history if "accuracy" in record
        ],
        "samples": learned["samples"],
        **{
            name: [round(value, 4) for value in learned[name]] for name in CURVES if name in learned
        },
        "seconds": round(time.perf_counter() - began, 1),
    }


def recorded(path: Path) -> dict[Cell, dict[str, Any]]:
    """Return the finished runs."""
    return {Cell(*(run[name] for name in Cell._fields)): run for run in finished_runs(path)}


def summary(runs: list[dict[str, Any]], averaged: list[dict[str, Any]]) -> dict[str, str]:
    """Return the figures of a method's runs.

    They are the best and last accuracy, and the mean of the last ten evaluations with its lead over
    FedAvg on the same seeds. Then follow the largest decrease between two evaluations in the second
    half, and two shares of the training samples with wrong labels: the last model predicts the
    given label, or the true one. Mean ± sample deviation over seeds, in %.
    """

    def percent(values: Iterable[float | None]) -> str:
        percents = [100 * value for value in values if value is not None]
        spread = f" ± {statistics.stdev(percents):.1f}" if len(percents) > 1 else ""
        return f"{statistics.fmean(percents):.1f}{spread}" if percents else "-"

    def late(run: dict[str, Any]) -> float:
        return statistics.fmean(run["accuracy"][-10:])

    def fall(accuracy: list[float]) -> float:
        return max(earlier - later for earlier, later in pairwise(accuracy[len(accuracy) // 2 :]))

    base = {run["seed"]: late(run) for run in averaged}
    above = [
        late(run) - base[run["seed"]] for run in runs if run["seed"] in base and run not in averaged
    ]
    seeds = f" ({sum(difference > 0 for difference in above)} of {len(above)})" if above else ""
    return {
        "best": percent(max(run["accuracy"]) for run in runs),
        "last": percent(run["accuracy"][-1] for run in runs),
        "last ten": percent(map(late, runs)),
        "above FedAvg (in seeds)": percent(above) + seeds,
        "largest fall": percent(fall(run["accuracy"]) for run in runs),
        "as given": percent(run.get("memorised", [None])[-1] for run in runs),
        "as is true": percent(run.get("corrected", [None])[-1] for run in runs),
        "seeds": str(len(runs)),
    }


def tables(done: dict[Cell, dict[str, Any]]) -> None:
    """Print the number of missing runs and the tables.

    The first table compares all methods by the mean of their last ten evaluations. For each data
    set, model and share of noise follows a table of all figures.
    """
    cells = list(plan())
    print(f"{sum(cell in done for cell in cells)} of {len(cells)} runs\n")
    methods = dict.fromkeys(cell.method for cell in cells)
    rows: dict[tuple[str, str, float, str], dict[str, list[dict[str, Any]]]] = {}
    for cell in cells:
        if cell in done:
            row = rows.setdefault(
                (cell.data, cell.model, cell.noise, cell.partition), {name: [] for name in methods}
            )
            row[cell.method].append(done[cell])
    ordered = sorted(rows.items(), key=itemgetter(0))
    header = ["data", "model", "replaced", "partition", *methods]
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for (data, model, noise, partition), by_method in ordered:
        means = [summary(runs, by_method["fedavg"])["last ten"] for runs in by_method.values()]
        print(f"| {data} | `{model}` | {noise:.0%} | {partition} | {' | '.join(means)} |")
    for (data, model, noise), block in groupby(ordered, lambda item: item[0][:3]):
        print(f"\n{data}, `{model}`, {noise:.0%} of the labels replaced:\n")
        rows_shown = [
            {"partition": key[3], "method": method, **summary(runs, by_method["fedavg"])}
            for key, by_method in block
            for method, runs in by_method.items()
            if runs
        ]
        print(f"| {' | '.join(rows_shown[0])} |\n|{' --- |' * len(rows_shown[0])}")
        print("\n".join(f"| {' | '.join(row.values())} |" for row in rows_shown))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mnist", help="folder with MNIST's idx files; without it those runs are left out"
    )
    parser.add_argument(
        "--record", type=Path, default=Path(__file__).parent / "records" / "label_noise.jsonl.gz"
    )
    parser.add_argument("--tables", action="store_true", help="print what is recorded, run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = recorded(arguments.record)
    data = {"digits": make_dataset("digits")}
    if arguments.mnist:
        mnist = make_dataset(f"mnist(folder={arguments.mnist!r})")
        data["mnist"] = replace(mnist, train=mnist.train[:6000])
    missing = (
        []
        if arguments.tables
        else [cell for cell in plan() if cell not in done and cell.data in data]
    )
    for cell in missing:
        done[cell] = measure(cell, data[cell.data])
        append(arguments.record, done[cell])
        print(
            f"{len(done)} runs: {cell}, last {100 * done[cell]['accuracy'][-1]:.1f} %", flush=True
        )
    tables(done)


if __name__ == "__main__":
    main()
