"""Measure the cost of loading data in the standard formats.

The figures are seconds and peak memory, and the share of a training step. Run `python
benchmarks/data_loading.py [--data FOLDER]`. FOLDER (default: FEDLOOM_DATA) may hold MNIST. The
script writes CIFAR-10 to a temporary folder in full size, with random pixels, in the Python and the
binary format. A separate process loads each set, so that its peak memory is separate. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fedloom.data.dataset import Dataset, Samples, datasets

_BATCH = 50
_STEPS = 60


def main() -> None:
    """Measure; print a table and then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data", default=os.environ.get("FEDLOOM_DATA"), help="folder that may hold MNIST"
    )
    parser.add_argument("--load", nargs=2, metavar=("SET", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(load_here(*arguments.load)))
        return
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for form, write in (("python", write_python),):
            path = Path(folder) / form
            path.mkdir()
            write(path)
            figures[f"cifar10 {form}"] = load_apart("cifar10", str(path))
    if arguments.data and any(Path(arguments.data).glob("[Mm][Nn][Ii][Ss][Tt]")):
        figures["mnist"] = load_apart("mnist", arguments.data)
    share = batch_share()
    table = Table("data set", "seconds", "peak MB", "MB over import")
    for name, row in figures.items():
        table.add_row(
            name, f"{row['seconds']:.2f}", f"{row['peak_mb']:.0f}", f"{row['over_import_mb']:.0f}"
        )
    console = Console()
    console.print(table)
    console.print(
        f"batch of {_BATCH}: gather and prepare {share['batch_ms']:.3f} ms, step "
        f"{share['step_ms']:.2f} ms, "
        f"share {share['share']:.1%}"
    )
    print(json.dumps({"loading": figures, "batch": share}))


def load_apart(name: str, folder: str) -> dict[str, float]:
    """Run `load_here` in a fresh process."""
    command = [sys.executable, __file__, "--load", name, folder]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    times: dict[str, float] = json.loads(output)
    return times


def load_here(name: str, folder: str) -> dict[str, float]:
    """Return seconds of loading, peak memory (MB), and its excess over the peak after the
    imports.
    """
    make = datasets[name].make
    imported = _peak_mb()
    began = time.perf_counter()
    data = make(folder=folder)
    seconds = time.perf_counter() - began
    assert len(data.train) in (50_000, 60_000)
    return {"seconds": seconds, "peak_mb": _peak_mb(), "over_import_mb": _peak_mb() - imported}


def _peak_mb() -> float:
    status = Path("/proc/self/status")
    if status.is_file():  # on Linux ru_maxrss starts at the parent's peak
        return (
            next(
                int(line.split()[1])
                for line in status.read_text().splitlines()
                if line.startswith("VmHWM")
            )
            / 2**10
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _batches() -> list[tuple[str, np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    return [
        (name, draw.integers(0, 256, (10_000, 3072), dtype=np.uint8), draw.integers(0, 10, 10_000))
        for name in names
    ]


def write_python(folder: Path) -> None:
    """Write CIFAR-10's six Python batches, 10,000 random images each."""
    for name, pixels, labels in _batches():
        # The authors' files hold the pixels as one byte string, as protocol 4 does.
        (folder / name).write_bytes(
            pickle.dumps({"data": pixels, "labels": labels.tolist()}, protocol=4)
        )


def batch_share() -> dict[str, float]:
    """Return milliseconds of a batch, of a step, and the share of the batch in the step.

    The batch is gathered from CIFAR-shaped bytes and prepared. The step is a whole SGD step on
    FedALA's CNN and contains the batch. Both are medians on one thread.
    """
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8, generator=draw)
    samples = Samples(pixels, torch.randint(0, 10, (50_000,), generator=draw))
    data = Dataset(
        "random", samples, samples[:0], 10, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262)
    )
    order = torch.randperm(len(samples), generator=draw)
    model = nn.Sequential(
        *(
            nn.Conv2d(3, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    # threads that wait for each other on a busy machine would hide the work itself
    torch.set_num_threads(1)
    times: list[tuple[float, float]] = []
    for step in range(_STEPS):
        began = time.perf_counter()
        rows = samples[order[step * _BATCH : (step + 1) * _BATCH]]
        inputs = data.prepare(rows.inputs)
        prepared = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), rows.labels).backward()
        optimizer.step()
        times.append((1e3 * (prepared - began), 1e3 * (time.perf_counter() - began)))
    warm = times[_STEPS // 4 :]  # the first steps warm caches up
    batch_ms, step_ms = (statistics.median(column) for column in zip(*warm, strict=True))
    return {"batch_ms": batch_ms, "step_ms": step_ms, "share": batch_ms / step_ms}


if __name__ == "__main__":
    main()
