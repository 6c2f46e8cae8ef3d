"""Compare successors of FedMR on digits, MNIST and CIFAR-10, with clean and wrong labels.

The first group of methods is compared by the global model on the test set. Some of its runs are
also three times as long, with wrong labels on digits. The second group makes a model for each
client and is compared by these models on the clients' own test samples. Twenty clients, ten per
round, Dirichlet 0.1 and 0.5; all labels are right, or uniform labels replace 40 % of the training
labels. MNIST and CIFAR-10 have their first 6,000 training images and all test images. Every method
has its own defaults and the same learning rate, 0.1. A finished run adds one line to the record. A
restarted script continues with the missing runs.

    # one core-hour for digits, more for the others
    python benchmarks/successors.py [--mnist FOLDER] [--cifar FOLDER] [--record FILE]
    python benchmarks/successors.py --tables  # only print
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import rankdata

import fedloom as fl
from fedloom.data import Dataset
from fedloom.data.dataset import make_dataset
from fedloom.report.significance import differences
from outcome import append, finished_runs

SEEDS = 3
GROUPS = {
    "global": (
        "fedavg", "fedmr", "fedmr(blend='auto')", "fedkdmr", "fedntd(fedmr)", "fedntd(fedavg)", "fedcross", "fedmut",
        "fedlc(fedavg)", "scaffold", "feddyn",
    ),
    "long": ("fedavg", "fedmr", "fedmr(blend='auto')", "fedkdmr", "fedntd(fedmr)", "fedntd(fedavg)", "fedmut", "scaffold"),
    "personal": (
        "fedavg", "fedala", "fedbabu", "fedrod", "apfl", "feddbe", "fedproto", "ditto", "fedpac", "fedas", "pfedfda", "fedrep",
    ),
}  # fmt: skip
SETS = {
    "digits": ("mlp(hidden=[64, 64])", 100),
    "mnist": ("mcmahan_2nn", 60),
    "cifar10": ("fedmr_cnn", 60),
}
"""Model and number of rounds by data set."""
PARTITIONS, NOISES = ("dirichlet(0.1)", "dirichlet(0.5)"), (0.0, 0.4)
TRAINING = {"learning_rate": 0.1, "epochs": 5, "batch_size": 50}
SAMPLES, EVALUATIONS, LAST, LONGER = 6000, 10, 3, 3


class Cell(NamedTuple):
    """One run; `noise` is the share of training labels that uniform ones replace."""

    group: str
    data: str
    partition: str
    noise: float
    method: str
    seed: int


def plan() -> Iterator[Cell]:
    """Return all runs: data set by data set, and seed by seed.

    Early results then cover every method.
    """
    for data, seed, noise, partition, group in product(
        SETS, range(SEEDS), reversed(NOISES), PARTITIONS, GROUPS
    ):
        if group != "long" or (data, noise) == ("digits", 0.4):
            for method in GROUPS[group]:
                yield Cell(group, data, partition, noise, method, seed)


def rounds_of(data: str, group: str) -> int:
    return SETS[data][1] * (LONGER if group == "long" else 1)


def measure(cell: Cell, data: Dataset) -> dict[str, Any]:
    """Run one cell.

    The accuracy is on the test set, or by the clients' own models on their own test samples.
    """
    model, rounds = SETS[cell.data][0], rounds_of(cell.data, cell.group)
    task = fl.make_task(
        data,
        clients=20,
        partition=cell.partition,
        model=model,
        training=TRAINING,
        label_noise=f"symmetric({cell.noise})" if cell.noise else "none",
        local_test=0.25 if cell.group == "personal" else None,
        seed=cell.seed,
    )
    every, began = rounds // EVALUATIONS, time.perf_counter()
    result = fl.run(
        cell.method,
        task,
        rounds=rounds,
        participation=0.5,
        seed=cell.seed,
        evaluate_every=every,
        personal_every=every if cell.group == "personal" else None,
        engine="stacked" if cell.data == "digits" else "rows",
    )
    figure = "personal_accuracy" if cell.group == "personal" else "accuracy"
    return {
        **cell._asdict(),
        "accuracy": [round(line[figure], 4) for line in result.history if figure in line],
        "bytes": sum(line["bytes_down"] + line["bytes_up"] for line in result.history),
        "seconds": round(time.perf_counter() - began, 1),
    }


def recorded(path: Path) -> dict[Cell, dict[str, Any]]:
    """Return the finished runs."""
    return {Cell(*(run[name] for name in Cell._fields)): run for run in finished_runs(path)}


def late(run: dict[str, Any]) -> float:
    """Return the mean of the last evaluations, in %."""
    return 100 * statistics.fmean(run["accuracy"][-LAST:])


def best(run: dict[str, Any]) -> float:
    """Return the best evaluation, in %."""
    return 100 * float(max(run["accuracy"]))


PAIRS = (
    ("fedkdmr", "fedavg"), ("fedkdmr", "fedmr"), ("fedntd(fedmr)", "fedavg"), ("fedntd(fedmr)", "fedmr"), ("fedmr", "fedavg"),
)  # fmt: skip


def distillation(done: dict[Cell, dict[str, Any]]) -> None:
    """Print the lead of distillation and recombination at the end, in points.

    It covers all runs with wrong labels of both methods. The brackets hold the number of runs with
    a lead, and the same by the best evaluations.
    """
    print(f"\n| data, rounds | {' | '.join(f'{method} over {other}' for method, other in PAIRS)} |")
    print("|---" * (len(PAIRS) + 1) + "|")
    for data, group in product(SETS, ("global", "long")):
        columns = []
        for method, other in PAIRS:
            pairs = [
                (run, done[key])
                for cell, run in done.items()
                if (cell.data, cell.group, cell.method) == (data, group, method) and cell.noise
                if (key := cell._replace(method=other)) in done
            ]
            if pairs:
                leads = [late(run) - late(other_run) for run, other_run in pairs]
                best_lead = statistics.fmean(
                    best(run) - best(other_run) for run, other_run in pairs
                )
                ahead = sum(lead > 0 for lead in leads)
                columns.append(
                    f"{statistics.fmean(leads):+.1f} ({ahead} of {len(leads)}; {best_lead:+.1f})"
                )
        if len(columns) == len(PAIRS):
            print(f"| {data}, {rounds_of(data, group)} | {' | '.join(columns)} |")


def tables(done: dict[Cell, dict[str, Any]]) -> None:
    """Print a table for each group and data set.

    It has the mean of each setting over seeds. Over the settings and seeds with runs of every
    method, it has the mean of the best evaluations, the mean rank, and the difference from FedAvg
    with both paired tests, corrected by Holm.
    """
    cells = list(plan())
    print(f"{sum(cell in done for cell in cells)} of {len(cells)} runs")
    for data, group in product(SETS, GROUPS):
        methods, settings = GROUPS[group], list(product(PARTITIONS, NOISES))
        figures = {
            method: {
                (partition, noise, seed): late(run)
                for (partition, noise), seed in product(settings, range(SEEDS))
                if (run := done.get(Cell(group, data, partition, noise, method, seed)))
            }
            for method in methods
        }
        present = [method for method in methods if figures[method]]
        complete = (
            sorted(set.intersection(*(set(figures[method]) for method in present)))
            if present
            else []
        )
        if not complete:
            continue
        ranks = [rankdata([-figures[method][case] for method in present]) for case in complete]
        tests = {
            test.method: test
            for test in differences(
                {m: {k: figures[m][c] for k, c in enumerate(complete)} for m in present}, "first"
            )
        }
        heads = [
            f"{partition.removeprefix('dirichlet')} {noise:.0%} wrong"
            for partition, noise in settings
        ] + ["best"]
        print(f"\n### {data}, {group} group: every method in {len(complete)} settings and seeds\n")
        print(
            f"| method | {' | '.join(heads)} | mean rank | above FedAvg | p (t-test) | p "
            "(exact) | verdict |"
        )
        print("|---" * (len(heads) + 6) + "|")
        for number in sorted(
            range(len(present)), key=lambda k: statistics.fmean(rank[k] for rank in ranks)
        ):
            method, rank = present[number], statistics.fmean(rank[number] for rank in ranks)
            columns = []
            for partition, noise in settings:
                values = [
                    v for (p, n, _), v in figures[method].items() if (p, n) == (partition, noise)
                ]
                spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                columns.append(f"{statistics.fmean(values):.1f}{spread}" if values else "-")
            runs = (done[Cell(group, data, p, n, method, seed)] for p, n, seed in complete)
            columns += [f"{statistics.fmean(map(best, runs)):.1f}", f"{rank:.1f}"]
            test = tests.get(method)
            if test is not None:
                p_values = [test.t_test_corrected, test.exact_corrected]
                columns += [
                    f"{test.mean:+.1f}",
                    *("-" if p is None else f"{p:.3f}" for p in p_values),
                    test.verdict,
                ]
            else:
                columns += ["-"] * 4
            print(f"| `{method}` | {' | '.join(columns)} |")
    distillation(done)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mnist", help="folder with MNIST's idx files; without it those runs are left out"
    )
    parser.add_argument("--cifar", help="folder with CIFAR-10; without it those runs are left out")
    parser.add_argument(
        "--record", type=Path, default=Path(__file__).parent / "records" / "successors.jsonl.gz"
    )
    parser.add_argument("--group", choices=GROUPS, help="run this group alone")
    parser.add_argument("--tables", action="store_true", help="print what is recorded, run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = recorded(arguments.record)
    data = {"digits": make_dataset("digits")}
    for name, folder in (("mnist", arguments.mnist), ("cifar10", arguments.cifar)):
        if folder:
            dataset = make_dataset(f"{name}(folder={folder!r})")
            data[name] = replace(dataset, train=dataset.train[:SAMPLES])
    cells = [cell for cell in plan() if cell.data in data and arguments.group in (None, cell.group)]
    for cell in [] if arguments.tables else cells:
        if cell in done:
            continue
        done[cell] = measure(cell, data[cell.data])
        append(arguments.record, done[cell])
        print(
            f"{len(done)} runs: {cell}, last {100 * done[cell]['accuracy'][-1]:.1f} %", flush=True
        )
    tables(done)


if __name__ == "__main__":
    main()
