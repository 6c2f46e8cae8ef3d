"""Answers of a replay: how the run here compares with the run in the bundle."""

import math
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from fedloom.common.digest import Checksum
from fedloom.reviews.evidence.referee import compare
from fedloom.reviews.evidence.trace import Trace
from fedloom.rounds.checkpoint import RoundLog
from fedloom.runs.directory import read_json, readable
from fedloom.state.tensors import read_tensors

ANSWERS = ("the same bytes", "the same to float tolerance", "within the seeds' spread", "different")

FIGURES = 1e-3
SAMPLES = 3
WEIGHTS = 1e-2
"""Float tolerance: shares by which a figure and a tensor of the final model may differ, and the
number of test samples by which a figure may differ.
"""

_SAME = ("metrics.jsonl", "clients.jsonl", "recorded.jsonl", "model.safetensors")


def outcome(bundled: Path, replayed: Path) -> tuple[int, str, str]:
    """Compare a run of a bundle with the same run here.

    Args:
        bundled: Directory of the run in the bundle.
        replayed: Directory of the run here.

    Returns:
        The index of the answer in `ANSWERS`, the first figure that differs, and where in the
        training or the model.
    """
    with readable(bundled):
        a, b = ([_checksum(path / name) for name in _SAME] for path in (bundled, replayed))
        if a[-1] is None:  # the model is too large for a bundle
            a[-1] = bundled_json(bundled, "result").get("files", {}).get(_SAME[-1])
        if a == b:
            return 0, "", ""
        figure = _first_figure(bundled, replayed)
        share, tensor = _furthest(bundled, replayed)
        if not figure and share <= WEIGHTS:
            return 1, "", ""
        if (bundled / "recorded").exists() and (
            difference := compare(Trace(bundled), Trace(replayed))
        ):
            return 3, figure, f"first in {difference[0]}, {difference[1]}"
        return 3, figure, f"the final model differs most in {tensor}, by {share:.1g} of it"


def bundled_json(path: Path, name: str) -> dict[str, Any]:
    """Return the contents of a JSON file of a run in a bundle.

    Args:
        path: Directory of the run in the unpacked bundle.
        name: Name of the file without `.json`.

    Returns:
        The JSON object as plain values. Raises as `read_json`.
    """
    return read_json(path / f"{name}.json", dict, "the bundle is of no use")


def final_figure(path: Path, name: str) -> float:
    """Return the last value of a figure of the run in a directory.

    Args:
        path: Directory of the run.
        name: Name of the figure in the records.

    Returns:
        The value of the last round that recorded it.
    """
    with readable(path):
        records = RoundLog(path / "metrics.jsonl").read()
        return [float(record[name]) for record in records if record.get(name) is not None][-1]


def _first_figure(bundled: Path, replayed: Path) -> str:
    """Return the first figure that differs beyond float tolerance, with both values; "" if none
    does.
    """
    claimed = bundled_json(bundled, "task")
    task = read_json(replayed / "task.json", dict)
    for name in ("train_samples", "test_samples"):
        if claimed.get(name) != task[name]:
            return f"{name} {claimed.get(name)!s:.40}, here {task[name]}"
    slack = SAMPLES / max(1, int(task["test_samples"]))
    for log in ("metrics.jsonl", "clients.jsonl"):
        records = (RoundLog(path / log).read() for path in (bundled, replayed))
        for a, b in zip_longest(*records, fillvalue=dict[str, Any]()):
            if text := _differing(a, b, slack):
                return text
    return ""


def _checksum(path: Path) -> str | None:
    return Checksum(path.read_bytes()).hexdigest() if path.exists() else None


def _differing(bundled: Mapping[str, Any], replayed: Mapping[str, Any], slack: float) -> str:
    """Return the first figure of a round that differs beyond float tolerance, with both values; ""
    where none does.
    """
    for name in bundled or replayed:
        a = bundled.get(name)
        b = replayed.get(name)
        if a != b and not _close(a, b, slack):
            return (
                f"from round {(bundled or replayed)['round']} on: {name} {str(a)[:40]}, "
                f"here {str(b)[:40]}"
            )
    return ""


def _close(a: Any, b: Any, slack: float) -> bool:
    """Return True if two figures are equal to float tolerance; of clients, by name, in the mean."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[name], b[name], slack) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        pairs = [(x, y) for x, y in zip(a, b, strict=False) if x is not None and y is not None]
        gaps = [0.0 if x == y else abs(x - y) for x, y in pairs]
        return len(a) == len(b) and bool(sum(gaps) <= (FIGURES + slack) * max(1, len(gaps)))
    if not (isinstance(a, float) and isinstance(b, float)):
        return bool(a == b)
    return abs(a - b) <= FIGURES * max(abs(a), abs(b)) + slack


def _furthest(bundled: Path, replayed: Path) -> tuple[float, str]:
    """Return the largest difference of a tensor of the final models, as a share of it, and its
    name.
    """
    if not (bundled / "model.safetensors").exists():
        return 0.0, "a model that the bundle does not hold"
    a, b = (read_tensors(path / "model.safetensors")[0] for path in (bundled, replayed))
    for name in sorted(a.keys() | b.keys()):
        shapes = [tuple(tensors[name].shape) if name in tensors else "none" for tensors in (a, b)]
        if shapes[0] != shapes[1]:
            return math.inf, f"{name} of shape {shapes[0]}, here {shapes[1]}"
    shares = {
        name: torch.dist(b[name].double(), t.double()) / (t.double().norm() + 1e-30)
        for name, t in a.items()
    }
    return max((float(share), name) for name, share in shares.items())
