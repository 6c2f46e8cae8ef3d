"""Compare a run with the rule's number of threads and with other numbers, in turn.

    python benchmarks/threads.py [--tasks digits,logistic,mlp,cnn] [--beside 1] [--turns 3]

The figures are seconds over the best of the same turn. `rule` is a run as the command line starts
it. `one` and `all` set the threads; `spinning` is `all` with threads that spin while they wait,
PyTorch's default. `--beside N` runs N busy processes meanwhile. Every run is a separate process,
and only local training is timed. A run of more than `--patience` seconds is ended and counts with
this time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from outcome import tell

JOB = """
algorithm = "fedavg"
rounds = {rounds}
evaluate_every = {rounds}
participation = {participation}
engine = "{engine}"
model = "{model}"
[data]
name = "{data}"
clients = {clients}
[training]
epochs = 5
"""
TASKS = {
    "digits": {"model": "mlp(hidden=[128, 128])", "data": "digits", "clients": 20, "participation": 0.5, "rounds": 40},
    "logistic": {"model": "logistic", "data": "synthetic", "clients": 100, "participation": 0.1, "rounds": 40},
    "mlp": {"model": "mlp(hidden=[200])", "data": "synthetic(dimension=784)", "clients": 50, "participation": 0.2, "rounds": 9},
    "cnn": {"model": "digits_cnn", "data": "digits", "clients": 20, "participation": 0.5, "rounds": 10},
}  # fmt: skip
SETTINGS = {
    "rule": ("", {}),
    "one": ("threads=1", {}),
    "all": (f"threads={os.cpu_count()}", {}),
    "spinning": (f"threads={os.cpu_count()}", {"OMP_WAIT_POLICY": "ACTIVE"}),
}


def seconds(task: str, engine: str, setting: str, patience: float) -> float:
    """Return seconds of local training in one run."""
    option, variables = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(JOB.format(engine=engine, **TASKS[task]))
        command = [
            sys.executable,
            "-m",
            "fedloom",
            "run",
            "job.toml",
            "--quiet",
            *([option] if option else []),
        ]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OMP_", "MKL_"))
        }
        try:
            subprocess.run(
                command,
                cwd=folder,
                env=environment | variables,
                check=True,
                capture_output=True,
                timeout=patience,
            )
        except subprocess.TimeoutExpired:
            return patience
        (path,) = Path(folder).glob("runs/*/*/*/timings.jsonl")
        return sum(
            float(json.loads(line)["train_seconds"]) for line in path.read_text().splitlines()
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--engines", default="stacked,rows")
    parser.add_argument("--beside", type=int, default=0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for _ in range(options.beside):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        for task in options.tasks.split(","):
            for engine in options.engines.split(","):
                turns = [
                    {
                        threads: seconds(task, engine, threads, options.patience)
                        for threads in SETTINGS
                    }
                    for _ in range(options.turns)
                ]
                ratios = {
                    f"{threads}_ratio": round(
                        statistics.median(turn[threads] / min(turn.values()) for turn in turns), 2
                    )
                    for threads in SETTINGS
                }
                best = round(statistics.median(min(turn.values()) for turn in turns), 2)
                rows.append({"task": task, "engine": engine, "best_s": best, **ratios})
    tell(f"local training beside {options.beside} busy processes, over the best", rows)


if __name__ == "__main__":
    main()
