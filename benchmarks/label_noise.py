"""What wrong labels do to averaging and to recombination: methods on digits and MNIST, a share of the training labels replaced.

Twenty clients, ten a round, 400 rounds of 5 local epochs, batch 50, learning rate 0.1, five seeds; the test set is clean.
A run is one line of the record, appended when it ends: started again, the script goes on with the runs that are missing. The
most telling come first, and the tables show those that are there.

    python benchmarks/label_noise.py [--mnist FOLDER] [--record FILE]     # an hour and more on one core
    python benchmarks/label_noise.py --tables                              # only print
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedloom as fl
from fedloom.data import Dataset
from fedloom.recording.memorisation import CURVES
from fedloom.task import make_dataset
from outcome import tell

ROUNDS, SEEDS = 400, 5
PARTITIONS = ("dirichlet(1.0)", "dirichlet(0.1)", "iid")
TOLD = ("fedavg", "fedmr", "stages(fedavg:50, fedmr)")
OTHERS = ("fedprox", "fedasam", "fedmut")
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
    """All runs, the most telling first."""
    for model, noises, methods in (
        (LARGE, (0.4, 0.0), TOLD), (LARGE, (0.4, 0.0), OTHERS), (LARGE, (0.2, 0.6), (*TOLD, *OTHERS)),
        (SMALL, (0.4, 0.0), TOLD), (SMALL, (0.4, 0.0), OTHERS), (SMALL, (0.2, 0.6), (*TOLD, *OTHERS)),
    ):  # fmt: skip
        for noise, partition, method, seed in product(noises, PARTITIONS, methods, range(SEEDS)):
            yield Cell("digits", noise, partition, model, method, seed)
    for seed, partition, method in product(
        range(SEEDS), PARTITIONS, TOLD[:2]
    ):  # ten times as long: every cell once, first
        yield Cell("mnist", 0.4, partition, LARGE, method, seed)


def measure(cell: Cell, data: Dataset) -> dict[str, Any]:
    """Run one cell; accuracy on the test set after every fifth round, on right and wrong training labels every 20th."""
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
        "accuracy": [round(one["accuracy"], 4) for one in result.history if "accuracy" in one],
        "samples": learned["samples"],
        **{name: [round(value, 4) for value in learned[name]] for name in CURVES if name in learned},
        "seconds": round(time.perf_counter() - began, 1),
    }


def recorded(path: Path) -> dict[Cell, dict[str, Any]]:
    """The runs that have ended."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {Cell(*(run[name] for name in Cell._fields)): run for run in map(json.loads, lines)}


def summary(runs: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Best and last accuracy of a method over the seeds, the largest fall between two evaluations of the second half, and what
    its last model does with wrong labels; mean ± sample deviation, in %."""
    found = list(runs)

    def percent(values: Iterable[float | None]) -> str:
        known = [100 * value for value in values if value is not None]
        spread = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
        return f"{statistics.fmean(known):.1f}{spread}" if known else "-"

    def fall(accuracy: list[float]) -> float:
        late = accuracy[len(accuracy) // 2 :]
        return max(before - after for before, after in pairwise(late))

    return {
        "best": percent(max(run["accuracy"]) for run in found),
        "last": percent(run["accuracy"][-1] for run in found),
        "last_ten": percent(statistics.fmean(run["accuracy"][-10:]) for run in found),
        "largest_fall": percent(fall(run["accuracy"]) for run in found),
        "memorised": percent(run.get("memorised", [None])[-1] for run in found),
        "corrected": percent(run.get("corrected", [None])[-1] for run in found),
        "seeds": str(len(found)),
    }


def tables(done: dict[Cell, dict[str, Any]]) -> None:
    """One table for each data set, model and share of noise."""
    blocks: dict[tuple[str, str, float], list[Cell]] = {}
    for cell in plan():
        if cell in done:
            blocks.setdefault((cell.data, cell.model, cell.noise), []).append(cell)
    for (data, model, noise), cells in blocks.items():
        rows = []
        for partition, method in dict.fromkeys((cell.partition, cell.method) for cell in cells):
            runs = [done[cell] for cell in cells if (cell.partition, cell.method) == (partition, method)]
            rows.append({"partition": partition, "method": method, **summary(runs)})
        tell(f"{data}, {model}, {noise:.0%} of the labels replaced, {ROUNDS} rounds", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", help="folder with MNIST's idx files; without it those runs are left out")
    parser.add_argument("--record", type=Path, default=Path(__file__).parent / "records" / "label_noise.jsonl")
    parser.add_argument("--tables", action="store_true", help="print what is recorded, run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = recorded(arguments.record)
    sets = {"digits": "digits", "mnist": f"mnist(folder={arguments.mnist!r})" if arguments.mnist else ""}
    missing = [] if arguments.tables else [cell for cell in plan() if cell not in done and sets[cell.data]]
    data: dict[str, Dataset] = {}
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    for cell in missing:
        if cell.data not in data:
            data[cell.data] = make_dataset(sets[cell.data])
        done[cell] = measure(cell, data[cell.data])
        with arguments.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[cell]) + "\n")
        print(f"{len(done)} runs: {cell}, last {100 * done[cell]['accuracy'][-1]:.1f} %", flush=True)
    tables(done)


if __name__ == "__main__":
    main()
