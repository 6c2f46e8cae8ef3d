"""Jobs of a small comparison."""

from __future__ import annotations

import json
from pathlib import Path

from fedloom.runs.config_file import configuration
from fedloom.study.comparison import Comparison
from fedloom.study.jobs import RunJob

ROUNDS = 4


def jobs(folder: Path, rounds: int = ROUNDS) -> list[RunJob]:
    settings = {
        "name": "job", "directory": str(folder), "algorithms": ["fedavg", "fedmr"], "rounds": rounds, "participation": 0.5,
        "model": "logistic", "threads": 1, "data": {"clients": 4},
    }  # fmt: skip
    return Comparison.of(configuration(settings)).jobs()


def rounds(job: RunJob) -> list[int]:
    """Return the rounds of a run with written metrics."""
    file = job.path / "metrics.jsonl"
    return (
        [json.loads(line)["round"] for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )
