"""What a trial of the engines found, kept on disk for the next run of such a task on this machine."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

import fedloom
from fedloom.config.fields import Count, Positive
from fedloom.config.rates import CONSTANT
from fedloom.data.formats.cache import cache_folder
from fedloom.engines.work import mean_steps
from fedloom.errors import CheckpointError
from fedloom.flat.device import processor
from fedloom.rounds.schedule import Schedule
from fedloom.state.files import remove_unfinished, write_bytes
from fedloom.task import Task

EngineName = Literal["rows", "stacked", "stacked(compiled=True)", "processes", "processes(inside=stacked)"]


@dataclass(frozen=True)
class TrialResult:
    """Seconds of a trial round in each engine, None for one that cannot take such a task: of so many `clients` that make `steps`
    each. `of` is what the trial was of, and `when` it was made."""

    of: dict[str, Any]
    clients: Count
    steps: Positive
    seconds: dict[EngineName, Positive | None]
    when: str

    def measured(self) -> dict[str, float]:
        """The seconds of the engines that can take the task."""
        return {name: seconds for name, seconds in self.seconds.items() if seconds is not None}

    def to_come(self, task: Task, schedule: Schedule | None) -> float:
        """Seconds that the rounds of the schedule take in the faster of the engines that start nothing."""
        if schedule is None:
            return float("inf")
        seconds = min(seconds for name, seconds in self.measured().items() if name in ("rows", "stacked"))
        longer = mean_steps(task) / self.steps * schedule.participants(task.clients) / self.clients
        return schedule.rounds * seconds * longer

    def keep(self) -> None:
        """Write it where `kept` looks, whole or not at all; where that cannot be written, the next run measures again."""
        with suppress(OSError, RuntimeError, CheckpointError):
            path = _file(self.of)
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(path.parent)
            write_bytes(path, json.dumps(asdict(self), indent=2).encode(), durable=False)


def kept(of: dict[str, Any]) -> TrialResult | None:
    """What a trial of this found that was made before; None where there was none, or where its file is damaged."""
    with suppress(OSError, RuntimeError, ValueError):
        found = TypeAdapter(TrialResult).validate_json(_file(of).read_bytes())
        return found if found.of == of and found.seconds.get("rows") else None
    return None


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def deciding(task: Task, schedule: Schedule | None) -> dict[str, Any]:
    """What decides which engine is fastest, as plain values: the machine, the versions, the model, the sizes and the settings of
    local training, but for the learning rate."""
    device, settings = task.initial.device, replace(task.training, learning_rate=1.0, decay=1.0, schedule=CONSTANT)
    sample = task.dataset.prepare(task.train.inputs[:1])
    named = (*task.model.named_parameters(), *task.model.named_buffers())
    architecture = f"{task.model} {[(name, tuple(tensor.shape)) for name, tensor in named]}"
    return {
        "fedloom": fedloom.__version__,
        "torch": torch.__version__,
        "processor": processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": torch.get_float32_matmul_precision(),
        "model": f"{type(task.model).__name__} {_digest(architecture)}",
        "weights": len(task.initial),
        "dtype": str(task.layout.dtype),
        "sample": [str(sample.dtype), *sample.shape[1:]],
        "objective": type(task.objective).__name__,
        "training": repr(settings),
        "local_steps": f"{mean_steps(task):.2g}",
        "participants": task.clients if schedule is None else schedule.participants(task.clients),
    }


def _file(of: dict[str, Any]) -> Path:
    return cache_folder() / "auto" / f"{_digest(json.dumps(of))}.json"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
