"""What a run is, as a digest that its checkpoints carry: only a run of the same identity goes on from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from fedloom.algorithm import Algorithm
from fedloom.task import Task

_SAMPLED = 1000  # inputs that stand for all of them when data are told apart


def identity(task: Task, described: Mapping[str, Any], method: Algorithm) -> str:
    """A digest of what determines the run: settings, split, labels, initial model and a sample of the inputs.

    The number of rounds is left out, so that a run can be lengthened, unless the method needs to know it.
    """
    if not method.needs_total_rounds:
        described = {key: value for key, value in described.items() if key != "rounds"}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for samples in (task.train, task.test):
        chosen = torch.linspace(0, max(len(samples) - 1, 0), min(len(samples), _SAMPLED)).long()
        for tensor in (samples.labels, samples.inputs[chosen.to(samples.inputs.device)]):
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
    for split in (task.partition, task.local_test):
        if split is not None:
            digest.update(split.indices.tobytes() + split.offsets.tobytes())
    for row in (task.initial, task.initial_integers):
        digest.update(row.cpu().numpy().tobytes())
    return digest.hexdigest()
