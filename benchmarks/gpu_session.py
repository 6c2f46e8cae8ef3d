"""Run all tests and benchmarks that need a GPU within six minutes, and print one table.

They are the tests, stacks over rows and over plain PyTorch, and mixed precision, one after another. Each line is a
separate program with a share of the time. A program that fails or exceeds its time also has a line
in the table; the exit code is then 1. With `--small` all programs are tiny and use the CPU, as a
trial of the session.

    python benchmarks/gpu_session.py [--minutes 6] [--small]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outcome import tell

HERE = Path(__file__).resolve().parent

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
GPU = [sys.executable, str(HERE / "gpu.py")]
SIZES = ["--clients", "10,100", "--samples", "100"]
MIXED = ["--tasks", "resnet20", "--autocast", "bfloat16", "--rounds", "2"]
STEPS: dict[str, tuple[float, list[str]]] = {
    "tests": (0.25, [*PYTEST, str(HERE.parent / "tests/common/test_device.py")]),
    "10 and 100 clients": (
        0.5,
        [*GPU, *SIZES, "--tasks", "mlp,cnn,resnet20", "--rounds", "3"],
    ),
    "bfloat16": (0.25, [*GPU, *SIZES, *MIXED]),
}
"""Commands, each with its share of the time."""

SMALL = [
    "--device",
    "cpu",
    "--clients",
    "2",
    "--samples",
    "20",
    "--matrix",
    "256",
    "--rounds",
    "1",
    "--tasks",
    "mlp",
]
COLUMNS = ("step", "what", "engine", "round_s", "over_rows", "share_of_peak", "note")


def lines_of(name: str, command: list[str], seconds: float) -> list[dict[str, Any]]:
    """Return the table's lines of one step."""
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return [{"step": name, "note": f"failed: not done after {seconds:.0f} s"}]
    took = f"{time.perf_counter() - began:.0f} s"
    last_line = (done.stdout.strip().splitlines() or [""])[-1]
    if name == "tests":
        counted = re.search(r"\d+ (passed|skipped|failed).*", last_line)
        return [
            {
                "step": name,
                "note": ("" if done.returncode == 0 else "failed: ")
                + (counted[0] if counted else last_line),
            }
        ]
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [last_line])[-1]
        return [{"step": name, "note": f"failed: {reason}"}]
    return [
        {
            **row,
            "step": name,
            "what": f"{row['method']}, {row['task']}, {row['clients']}",
            "note": took,
        }
        for row in json.loads(last_line)["rows"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--small", action="store_true", help="tiny and on the CPU")
    arguments = parser.parse_args()
    rows = []
    for name, (share, command) in STEPS.items():
        small = SMALL if arguments.small and name != "tests" else []
        lines = lines_of(name, [*command, *small], 60 * arguments.minutes * share)
        print(f"{name}: {lines[-1]['note']}", file=sys.stderr)
        rows += [{column: line.get(column, "") for column in COLUMNS} for line in lines]
    tell(f"a session on a GPU of {arguments.minutes:g} minutes", rows)
    sys.exit(any(str(row["note"]).startswith("failed") for row in rows))


if __name__ == "__main__":
    main()
