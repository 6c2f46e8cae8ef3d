"""Compare the mean of models with one copy of them, as shares of the copy's seconds.

The mean is plain and weighted, with one thread and with two.

python benchmarks/means.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from fedloom.flat.population import weighted_mean
from outcome import tell

POOLS = (
    (10, 200_000),
    (10, 2_000_000),
    (16, 200_000),
    (100, 200_000),
    (100, 2_000_000),
    (1000, 200_000),
)


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the minimum of some measurements, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def measure(models: int, size: int, threads: int, repeats: int) -> dict[str, Any]:
    """Return one line of the table."""
    torch.set_num_threads(threads)
    rows, weights = torch.randn(models, size), torch.rand(models)
    copy = torch.empty_like(rows)
    copying = seconds(lambda: copy.copy_(rows), repeats)
    return {
        "models": f"{models} x {size / 1e6:.1f} M",
        "threads": threads,
        "copy_ms": 1e3 * copying,
        "plain": seconds(lambda: weighted_mean(rows), repeats) / copying,
        "weighted": seconds(lambda: weighted_mean(rows, weights), repeats) / copying,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    tell("Means of models, as shares of a copy", [
        measure(models, size, threads, arguments.repeats) for threads in (1, 2) for models, size in POOLS
    ])  # fmt: skip


if __name__ == "__main__":
    main()
