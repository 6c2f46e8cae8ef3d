"""The identity of a run: a digest for its checkpoints, and the versions and the machine."""

import json
import os
import platform
from collections.abc import Mapping
from typing import Any

import numpy
import torch

import fedloom
from fedloom.algorithm.method import Method, needs_total_rounds
from fedloom.common.device import processor
from fedloom.common.digest import Digest, digest
from fedloom.data.lazy import in_memory
from fedloom.rounds.clock import Clock
from fedloom.task import Task

_SAMPLED = 1000  # inputs that represent the data in a comparison of two data sets

_DECIDING = ("python", "torch", "numpy", "fedloom", "threads", "machine")
"""Versions and settings that may change the last digits of a figure."""


def identity(task: Task, described: Mapping[str, Any], method: Method, clock: Clock) -> str:
    """Return a digest of the run. It ignores `stop`, and `rounds` unless the method needs their
    number.

    Args:
        task: The task. Its data, its partition and the initial model are part of the digest.
        described: The resolved configuration.
        method: The method.
        clock: The simulated clock. A trace counts by its contents, not by the file's name.

    Returns:
        The digest as text. Equal digests give equal figures up to the end of the shorter run.
    """
    end = ("stop",) if needs_total_rounds(method) else ("rounds", "stop")
    described = {key: value for key, value in described.items() if key not in end}
    return digest(json.dumps([described, task_digests(task), clock.lines or None], sort_keys=True))


def task_digests(task: Task) -> dict[str, str]:
    """Return digests of a task's `data`, of its `split` over clients and of the initial model
    (`start`).
    """
    data = Digest()
    split = Digest()
    start = Digest()
    for samples in (task.train, task.test):
        count = len(samples)
        chosen = torch.linspace(0, max(count - 1, 0), min(count, _SAMPLED)).long()
        inputs = in_memory(samples.inputs[chosen.to(samples.inputs.device)])
        for tensor in (samples.labels, inputs):
            data.update(tensor.contiguous().cpu().numpy().tobytes())
    for partition in (task.partition, task.local_test):
        if partition is not None:
            split.update(partition.indices.tobytes() + partition.offsets.tobytes())
    for row in (task.initial, task.initial_integers):
        start.update(row.cpu().numpy().tobytes())
    start.update(task.layout.frozen_digest(task.model).encode())
    return {"data": data.hexdigest(), "split": split.hexdigest(), "start": start.hexdigest()}


def environment() -> dict[str, Any]:
    """Return versions, platform and threads, as plain values."""
    return {
        "fedloom": fedloom.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def version_changes(earlier: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Return differences that may change a figure, such as `torch 2.12.0 (now 2.13.0)`, or "".

    Args:
        earlier: Versions and settings when the run began.
        present: Versions and settings now.

    Returns:
        Differences, separated by commas.
    """
    changed = [key for key in _DECIDING if earlier.get(key) != present.get(key)]
    return ", ".join(f"{key} {earlier.get(key)} (now {present.get(key)})" for key in changed)
