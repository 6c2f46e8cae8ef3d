"""Does FedMR with a share of averaging succeed where the models of its pool diverge?

The script compares FedAvg, FedMR and FedMR with a share of averaging chosen by the server. It uses
the settings of digits on which FedMR fails or is slow, settings with wrong labels on which it wins,
and two settings of MNIST. They have twenty clients, ten per round, and three seeds. A finished run
adds one line to the record. A restarted script continues with the missing runs.

    # half an hour of one core; an hour with MNIST
    python benchmarks/blend.py [--mnist FOLDER] [--record FILE]
    python benchmarks/blend.py --tables  # only print
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedloom as fl
from fedloom.data import Dataset
from outcome import append, finished_runs, tell

SEEDS = 3
METHODS = ("fedavg", "fedmr", "fedmr(blend='auto')")


class Setting(NamedTuple):
    """One setting: `model`, learning rate, momentum, batch size, local epochs, rounds,
    partition, share of replaced labels, data set.
    """

    model: str
    rate: float
    momentum: float
    batch: int
    epochs: int
    rounds: int
    partition: str = "dirichlet(0.1)"
    noise: float = 0.0
    data: str = "digits"


NARROW, WIDE = "mlp(hidden=[64, 64, 64])", "mlp(hidden=[128, 128])"
SETTINGS = (
    Setting(NARROW, 0.2, 0.0, 50, 5, 200),
    Setting(NARROW, 0.2, 0.0, 50, 5, 400),
    Setting(NARROW, 0.01, 0.9, 50, 5, 400),
    Setting(NARROW, 0.1, 0.0, 50, 5, 400),
    Setting(NARROW, 0.03, 0.0, 50, 5, 400),
    Setting(WIDE, 0.1, 0.0, 50, 5, 400, "dirichlet(1.0)", 0.4),
    Setting(WIDE, 0.1, 0.0, 50, 5, 400, "dirichlet(0.1)", 0.4),
    Setting(WIDE, 0.1, 0.0, 50, 5, 400, "iid", 0.4),
    Setting("digits_cnn", 0.05, 0.5, 50, 5, 60),
    Setting("digits_cnn", 0.05, 0.5, 50, 5, 100),
    Setting("digits_cnn", 0.01, 0.9, 50, 5, 120),
    Setting("digits_cnn", 0.1, 0.9, 50, 5, 100),
    Setting("digits_cnn", 0.1, 0.0, 50, 5, 100),
    Setting("digits_cnn", 0.1, 0.0, 10, 5, 100),
    Setting("digits_cnn", 0.1, 0.0, 10, 1, 200),
    Setting("digits_cnn", 0.05, 0.0, 10, 1, 300),
    Setting("mlp(hidden=[200, 200])", 0.1, 0.0, 50, 5, 100, data="mnist"),
    Setting("mlp(hidden=[200, 200])", 0.02, 0.9, 50, 5, 100, data="mnist"),
)


def noisy_task(data: str | Dataset, setting: Any, batch: int, seed: int) -> fl.Task:
    """Return the task of twenty clients for the setting.

    It has the setting's model, partition, label noise, learning rate, momentum and epochs.
    """
    return fl.make_task(
        data,
        clients=20,
        partition=setting.partition,
        model=setting.model,
        label_noise=f"symmetric({setting.noise})",
        seed=seed,
        training={
            "learning_rate": setting.rate,
            "momentum": setting.momentum,
            "batch_size": batch,
            "epochs": setting.epochs,
        },
    )


def measure(setting: Setting, method: str, seed: int, mnist: str | None) -> dict[str, Any]:
    """Make one run.

    Return its forty test accuracies, the pool's mean cosine similarity at the end, and the share of
    averaging. A run that diverges has the accuracy of guessing.
    """
    data = "digits" if setting.data == "digits" else f"mnist(folder={mnist!r})"
    task = noisy_task(data, setting, setting.batch, seed)
    began = time.perf_counter()
    accuracy = [1 / task.dataset.classes]
    measures: dict[str, Any] = {}
    try:
        result = fl.run(
            method,
            task,
            rounds=setting.rounds,
            participation=0.5,
            seed=seed,
            evaluate_every=setting.rounds // 40 or 1,
            engine="stacked" if setting.model.startswith("mlp") else "rows",
        )
    except fl.FedloomError as error:
        print(error)
    else:
        accuracy = [
            round(record["accuracy"], 4) for record in result.history if "accuracy" in record
        ]
        measures = {
            name: result.history[-1][name]
            for name in ("pool_cosine", "blend")
            if name in result.history[-1]
        }
    return {
        "setting": list(setting),
        "method": method,
        "seed": seed,
        "accuracy": accuracy,
        **measures,
        "seconds": round(time.perf_counter() - began, 1),
    }


def recorded(path: Path) -> dict[tuple[Setting, str, int], dict[str, Any]]:
    """Return the finished runs."""
    return {
        (Setting(*run["setting"]), run["method"], run["seed"]): run for run in finished_runs(path)
    }


def table(done: dict[tuple[Setting, str, int], dict[str, Any]]) -> None:
    """Print a row for each setting.

    It has the best, the last and the mean of the last four evaluations of each method, as means
    over the seeds, in %.
    """
    rows = []
    for setting in SETTINGS:
        row = {
            "setting": f"{setting.data}, {setting.model}, "
            f"{setting.rate:g} / {setting.momentum:g} / {setting.batch} / {setting.epochs}"
        }
        row |= {
            "rounds": str(setting.rounds),
            "partition": setting.partition,
            "noise": f"{setting.noise:g}",
        }
        for method in METHODS:
            runs = [
                done[setting, method, seed]
                for seed in range(SEEDS)
                if (setting, method, seed) in done
            ]
            if runs:
                ends = [statistics.fmean(run["accuracy"][-4:]) for run in runs]
                cosine = [run["pool_cosine"] for run in runs if run.get("pool_cosine") is not None]
                alike = f" ({statistics.fmean(cosine):.2f})" if cosine else ""
                row[method] = f"{100 * statistics.fmean(ends):.1f}{alike}"
                row["seeds"] = str(len(runs))
        rows.append(row)
    tell(
        "Mean accuracy of the last four of forty evaluations, % (mean cosine similarity of the "
        "pool)",
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mnist", help="folder with MNIST's idx files; without it those runs are left out"
    )
    parser.add_argument(
        "--record", type=Path, default=Path(__file__).parent / "records" / "blend.jsonl.gz"
    )
    parser.add_argument("--tables", action="store_true", help="print what is recorded, run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = recorded(arguments.record)
    for seed, setting, method in (
        () if arguments.tables else product(range(SEEDS), SETTINGS, METHODS)
    ):
        if (setting, method, seed) not in done and (arguments.mnist or setting.data != "mnist"):
            done[setting, method, seed] = run = measure(setting, method, seed, arguments.mnist)
            append(arguments.record, run)
            print(
                f"{len(done)} runs: {setting}, {method}, seed {seed}: "
                f"{100 * run['accuracy'][-1]:.1f} %",
                flush=True,
            )
    table(done)


if __name__ == "__main__":
    main()
