"""What a run is, as digests that its checkpoints carry: only a run of the same identity goes on from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from fedloom.algorithm import Algorithm
from fedloom.task import Task

_SAMPLED = 1000  # inputs that stand for all of them when data are told apart


def identities(task: Task, described: Mapping[str, Any], method: Algorithm, before: int | None) -> list[str]:
    """What checkpoints of this run carry, and what they carried in earlier versions, which counted the rounds, now and `before`.

    Without the rounds a run can be lengthened; where the method foresees their end, they are part of what it is.
    """
    if method.needs_total_rounds:
        return [_identity(task, described)]
    endless = {key: value for key, value in described.items() if key != "rounds"}
    counted = [{**described, "rounds": rounds} for rounds in {described["rounds"], before} - {None}]
    return [_identity(task, one) for one in (endless, *counted)]


def _identity(task: Task, described: Mapping[str, Any]) -> str:
    """A digest of what determines the run: settings, split, labels, initial model and a sample of the inputs."""
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
