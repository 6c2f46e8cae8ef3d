"""FedAvg and FedProx with stragglers on MNIST: Flower's FedProx baseline and the paper's setting.

1,000 clients with two classes each and sizes by a power law, of which ten take part in a round.
With a probability of 0, 50 or 90 % a client is a straggler. FedAvg drops stragglers (`dropout`),
FedProx averages their models after 1 to E - 1 of E epochs (`partial_work`); FedProx with mu = 0 is
FedAvg with partial work. Logistic regression, learning rate 0.03, batch size 10.

- `flower`: 100 rounds, 10 epochs, weight decay 0.001, mu = 0 and 2. Each client keeps 10 % of its
  samples.
- `paper`: 200 rounds, 20 epochs, no weight decay, mu = 0 and 1. All samples are used for training.

Differences: replies are weighted by samples (Flower: by batches), and the accuracy is that of the
global test set (paper: of the clients' test sets). Figures: mean of the last ten rounds, best, and
the mean absolute change of the accuracy from round to round in the second half of the run.

    # each finished run adds one line to the record
    python benchmarks/fedprox_baseline.py --mnist FOLDER [--seeds 3] [--only flower]
    python benchmarks/fedprox_baseline.py --tables  # only print
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import append, finished_runs, tell

CLIENTS = 1000
PARTICIPATION = 0.01
STRAGGLERS = (0.0, 0.5, 0.9)
RECORD = Path(__file__).parent / "records" / "fedprox_baseline.jsonl.gz"


class Setting(NamedTuple):
    """A setting of the comparison."""

    rounds: int
    epochs: int
    weight_decay: float
    mu: float
    local_test: float | None


SETTINGS = {
    "flower": Setting(rounds=100, epochs=10, weight_decay=0.001, mu=2.0, local_test=0.1),
    "paper": Setting(rounds=200, epochs=20, weight_decay=0.0, mu=1.0, local_test=None),
}


class Run(NamedTuple):
    """One run: a method of a setting with a probability of stragglers and a seed."""

    setting: str
    method: str
    stragglers: float
    seed: int


def runs(seeds: int) -> Iterator[Run]:
    """Yield all runs, seed by seed."""
    for seed in range(seeds):
        for name, setting in SETTINGS.items():
            for stragglers in STRAGGLERS:
                for method in ("FedAvg", "FedProx, mu=0", f"FedProx, mu={setting.mu:g}"):
                    if stragglers or method != "FedProx, mu=0":  # without stragglers it is FedAvg
                        yield Run(name, method, stragglers, seed)


def task_of(run: Run, folder: str) -> Task:
    """Return the task of a run."""
    setting = SETTINGS[run.setting]
    training = Training(
        learning_rate=0.03,
        epochs=setting.epochs,
        batch_size=10,
        weight_decay=setting.weight_decay,
    )
    return make_task(
        f"mnist(folder={folder!r}, normalise='standard')",
        clients=CLIENTS,
        partition="power_law",
        model="logistic",
        seed=run.seed,
        training=training,
        local_test=setting.local_test,
    )


def measure(run: Run, folder: str) -> dict[str, Any]:
    """Make a run; return it as a line of the record."""
    task = task_of(run, folder)
    drops = run.method == "FedAvg"
    mu = 0.0 if drops else float(run.method.partition("=")[2])
    method = f"partial_work(fedprox(mu={mu}), stragglers={0.0 if drops else run.stragglers})"
    schedule = Schedule(
        SETTINGS[run.setting].rounds,
        PARTICIPATION,
        seed=run.seed,
        evaluate_every=1,
        personal_every=0,
        dropout=run.stragglers if drops else 0.0,
    )
    began = time.process_time()
    federation = Federation(build(method), task, RowsEngine(task), schedule)
    federation.run()
    return {
        **run._asdict(),
        "accuracy": [round(record["accuracy"], 4) for record in federation.history],
        "loss": [round(record["loss"], 4) for record in federation.history],
        "processor_seconds": round(time.process_time() - began, 1),
    }


def spread(values: Sequence[float]) -> str:
    """Return mean and deviation over the seeds, in %."""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{deviation}"


def change(accuracies: Sequence[float]) -> float:
    """Return the mean absolute change from round to round in the second half of a run."""
    half = accuracies[len(accuracies) // 2 :]
    return statistics.fmean(abs(after - before) for before, after in pairwise(half))


def table(lines: Sequence[dict[str, Any]]) -> None:
    """Print a row for each setting, share of stragglers and method."""
    groups: dict[tuple[str, float, str], list[list[float]]] = {}
    for line in lines:
        key = line["setting"], line["stragglers"], line["method"]
        groups.setdefault(key, []).append(line["accuracy"])
    rows = [
        {
            "setting": setting,
            "stragglers": f"{stragglers:.0%}",
            "method": method,
            "seeds": len(seeds),
            "last ten": spread([statistics.fmean(accuracies[-10:]) for accuracies in seeds]),
            "best": spread([max(accuracies) for accuracies in seeds]),
            "change": spread([change(accuracies) for accuracies in seeds]),
        }
        for (setting, stragglers, method), seeds in groups.items()
    ]
    if rows:
        tell("FedAvg and FedProx with stragglers, MNIST, 1,000 clients, test accuracy in %", rows)


def main() -> None:
    """Make the missing runs, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mnist", help="folder with MNIST's idx files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=sorted(SETTINGS), help="one of the settings")
    parser.add_argument("--tables", action="store_true", help="print the record, run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = Run._fields
    done = {Run(*(line[name] for name in names)): line for line in finished_runs(RECORD)}
    for run in () if arguments.tables else runs(arguments.seeds):
        if run not in done and arguments.only in (None, run.setting):
            done[run] = measure(run, arguments.mnist)
            append(RECORD, done[run])
            print(f"{run}: {done[run]['accuracy'][-1]} in {done[run]['processor_seconds']} s")
    table(list(done.values()))


if __name__ == "__main__":
    main()
