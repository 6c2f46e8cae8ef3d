"""Compare rounds of FedMR with its pool in memory and in files of the run.

Both run the same few rounds, each in a separate process, with one local step on one batch and 20
test samples. The server's work then dominates.

- `held_mb`: peak memory of the process above its memory after the engine was made, without pages of
  files. The system reclaims those pages when it needs them.
- `round_s`, `server_s`: medians over the rounds after the first. `server_s` is recombination.
- `whole_s`: mean time over the rounds, including checkpoints.
- `written_gb`: bytes that the process wrote to the disk.
- `files_gb`: largest size of the run's directory.
- `model`: digest of the last global model.

    python benchmarks/pool.py [--model vgg16] [--clients 100] [--rounds 3] [--budget 4GiB]
        [--directory .] [--only files]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engines import random_task
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from memory import imports, status
from outcome import tell

MODELS = {
    "mlp": ("mlp", (784,)),
    "resnet18": ("resnet18", (3, 32, 32)),
    "vgg16": ("fedmr_vgg16", (3, 32, 32)),
}
SAMPLES = 2  # per client, all in one batch


class Watch(threading.Thread):
    """Records the peak memory of this process, and the largest size of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.held, self.files = folder, 0.0, 0
        self.start()

    def run(self) -> None:
        while True:
            self.held = max(self.held, status("RssAnon") + status("RssShmem"))
            sizes = []
            for path in self.folder.rglob("*"):
                try:
                    sizes.append(path.stat().st_size)
                except OSError:  # removed meanwhile
                    continue
            self.files = max(self.files, sum(sizes))
            time.sleep(0.02)


def measure(
    model: str, clients: int, rounds: int, budget: str | None, directory: str
) -> dict[str, Any]:
    """Return one line, from this process."""
    torch.set_num_threads(1)
    name, shape = MODELS[model]
    task = random_task(name, shape, clients, SAMPLES, batch_size=SAMPLES)
    task = replace(task, test=task.test[:20])
    schedule = Schedule(
        rounds,
        1.0,
        evaluate_every=rounds,
        checkpoint_every=rounds,
        pool_budget=budget,  # type: ignore[arg-type]
    )
    engine, imported = RowsEngine(task), imports()
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        watch = Watch(Path(folder))
        federation = Federation(build("fedmr"), task, engine, schedule, Path(folder))
        began = time.perf_counter()
        federation.run()
        elapsed = time.perf_counter() - began
        later = federation.timings[1:] or federation.timings
        written = re.search(r"^write_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
        return {
            "pool": "memory" if budget is None else f"files, {budget}",
            "models": f"{clients} x {task.layout.size / 1e6:.1f} M",
            "pool_gb": clients * task.layout.row_bytes / 1e9,
            "held_mb": watch.held - imported,
            "round_s": statistics.median(timing["seconds"] for timing in later),
            "train_s": statistics.median(timing["train_seconds"] for timing in later),
            "server_s": statistics.median(timing["server_seconds"] for timing in later),
            "whole_s": elapsed / rounds,
            "written_gb": 0.0 if written is None else int(written[1]) / 1e9,
            "files_gb": watch.files / 1e9,
            "model": hashlib.sha256(federation.model().numpy().tobytes()).hexdigest()[:12],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vgg16", choices=list(MODELS))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument(
        "--directory", default=".", help="where the runs' files go for the time being"
    )
    parser.add_argument("--only", choices=["memory", "files"], help="one of the two")
    parser.add_argument(
        "--alone", action="store_true", help="measure in this process, and print one line"
    )
    arguments = parser.parse_args()
    if arguments.alone:
        budget = None if arguments.only == "memory" else arguments.budget
        line = measure(
            arguments.model, arguments.clients, arguments.rounds, budget, arguments.directory
        )
        print(json.dumps(line))
        return
    rows = []
    for where in ("memory", "files") if arguments.only is None else (arguments.only,):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", where, "--alone"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
    tell("FedMR with its pool in memory and in files", rows)


if __name__ == "__main__":
    main()
