"""Order, time and traffic of the personalised methods: FedALA's Tables 2, 7 and 3.

The data sets are MNIST and digits. Protocol (FedALA, section 5): training and test parts are
merged. 20 clients all take part, and each uses 25 % of its samples for testing. The CNN has
learning rate 0.1, batch 10 and one local epoch; the last short batch is dropped. The result is the
best accuracy over rounds on the clients' own test data. MNIST is cut to `--samples` images, so that
every method and seed completes its rounds on a small machine. Digits (8x8) is complete and has its
own small CNN.

    python benchmarks/fedala_tables.py --mnist FOLDER [--samples 10000] [--rounds 20]
        [--digits-rounds 60] [--seeds 3]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from fedloom.common.device import keep_pages
from fedloom.data import Dataset
from fedloom.data.dataset import make_dataset
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.reviews.papers.printed import printed
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import tell

METHODS = {
    "fedavg": "FedAvg", "fedprox(mu=0.001)": "FedProx", "fedavg_c": "FedAvg-C", "fedprox_c(mu=0.001)": "FedProx-C",
    "per_fedavg": "Per-FedAvg", "fedrep": "FedRep", "pfedme": "pFedMe", "ditto": "Ditto", "fedamp": "FedAMP",
    "fedphp": "FedPHP", "fedfomo": "FedFomo", "apple": "APPLE", "partialfed": "PartialFed", "fedala": "FedALA",
}  # fmt: skip
"""The paper's name of each method."""

PARTITIONS = {"pathological": "pathological(2)", "dirichlet 0.1": "dirichlet(0.1, minimum=20)"}


class Cell(NamedTuple):
    """One run: data set, partition, method and seed."""

    data: str
    partition: str
    method: str
    seed: int


class Outcome(NamedTuple):
    """The outcome of a run.

    It has the best accuracy on the clients' own test data, the round of this accuracy, seconds of
    training per round, and the traffic of one client in a round, in models.
    """

    best: float
    best_round: int
    seconds: float
    traffic: float


def printed_accuracy(partition: str, method: str) -> float | str:
    """Return the paper's figure for MNIST; `-` for methods outside the tables.

    It is from table 2 (pathological) or 7 (Dirichlet 0.1).
    """
    numbers = printed("fedala", "2" if partition == "pathological" else "7")
    means = (
        n["mean"] for n in numbers if (n["dataset"], n["method"]) == ("mnist", METHODS.get(method))
    )
    return next(means, "-")


def digits_or_mnist(cell: Cell, folder: str, samples: int) -> Task:
    """Return the task of a cell."""
    data = make_dataset(
        "digits" if cell.data == "digits" else f"mnist(folder='{folder}', normalise=half)"
    )
    if cell.data == "mnist" and samples:
        samples_all = data.train.concatenate(data.test)
        chosen = samples_all[
            torch.randperm(len(samples_all), generator=torch.Generator().manual_seed(0))[:samples]
        ]
        data = Dataset(
            data.name,
            chosen[: samples // 2],
            chosen[samples // 2 :],
            data.classes,
            data.mean,
            data.std,
        )
    return make_task(
        data,
        clients=20,
        partition=PARTITIONS[cell.partition],
        model="digits_cnn" if cell.data == "digits" else "cnn4",
        merge=True,
        local_test=0.25,
        seed=cell.seed,
        training={"learning_rate": 0.1, "batch_size": 10, "drop_last": True},
    )


def measure(cell: Cell, folder: str, samples: int, rounds: dict[str, int], every: int) -> Outcome:
    """Run one cell on one thread."""
    torch.set_num_threads(1)
    keep_pages()
    task = digits_or_mnist(cell, folder, samples)
    schedule = Schedule(
        rounds=rounds[cell.data],
        participation=1.0,
        seed=cell.seed,
        evaluate_every=rounds[cell.data],
        personal_every=every,
    )
    run = Federation(build(cell.method), task, RowsEngine(task), schedule)
    run.run()
    scores = {
        record["round"]: record["personal_accuracy"]
        for record in run.history
        if "personal_accuracy" in record
    }
    record = run.history[-1]
    sent = (record["bytes_down"] + record["bytes_up"]) / task.clients / 4 / task.layout.size
    # The first rounds are a warm-up; in the second round FedALA learns its weights to convergence.
    seconds = statistics.median(
        timing["train_seconds"] for timing in run.timings[2:] or run.timings
    )
    best_round = max(scores, key=lambda number: scores[number])
    return Outcome(scores[best_round], best_round, seconds, sent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mnist", default="data/MNIST", help="folder with MNIST's idx files")
    parser.add_argument(
        "--samples", type=int, default=10_000, help="MNIST images in all; 0 for all 70,000"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--digits-rounds", type=int, default=60)
    parser.add_argument(
        "--every", type=int, default=2, help="rounds between two evaluations of the personal models"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default="digits,mnist")
    parser.add_argument("--methods", default=";".join(METHODS), help="expressions, separated by ;")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    methods = arguments.methods.split(";")
    rounds = {"mnist": arguments.rounds, "digits": arguments.digits_rounds}
    cells = [
        Cell(data, partition, method, seed)
        for data in arguments.data.split(",")
        for partition in PARTITIONS
        for method in methods
        for seed in range(arguments.seeds)
    ]
    began = time.perf_counter()
    job = partial(
        measure,
        folder=arguments.mnist,
        samples=arguments.samples,
        rounds=rounds,
        every=arguments.every,
    )
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        outcomes = dict(zip(cells, pool.map(job, cells), strict=True))
    rows: list[dict[str, Any]] = []
    for data in arguments.data.split(","):
        for partition in PARTITIONS:
            block = {
                m: [outcomes[Cell(data, partition, m, s)] for s in range(arguments.seeds)]
                for m in methods
            }
            base = statistics.mean(outcome.seconds for outcome in block[methods[0]])
            for method, seeds in sorted(
                block.items(),
                key=lambda item: -statistics.mean(outcome.best for outcome in item[1]),
            ):
                best = [100 * outcome.best for outcome in seeds]
                rows.append({
                    "data": data,
                    "partition": partition,
                    "method": method,
                    "rounds": rounds[data],
                    "accuracy": round(statistics.mean(best), 2),
                    "std": round(statistics.stdev(best), 2) if len(best) > 1 else 0.0,
                    "paper_mnist": printed_accuracy(partition, method),
                    "seconds_a_round": statistics.mean(outcome.seconds for outcome in seeds),
                    "over_fedavg": statistics.mean(outcome.seconds for outcome in seeds) / base,
                    "models_sent": round(seeds[0].traffic, 3),
                    "best_round": round(statistics.mean(outcome.best_round for outcome in seeds)),
                })  # fmt: skip
    tell(f"FedALA Tables 2, 7, 3 ({(time.perf_counter() - began) / 60:.0f} minutes)", rows)


if __name__ == "__main__":
    main()
