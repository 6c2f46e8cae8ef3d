"""Replays: the runs of a bundle made again here, and how the figures compare cell by cell, a method
in a setting each.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from fedloom.config.expression import Call
from fedloom.data.dataset import datasets
from fedloom.errors import FedloomError, InvalidValue, one_line, quoted
from fedloom.report.units import time_text
from fedloom.reviews.evidence.bundle import Bundle, relocated, rewritten
from fedloom.reviews.evidence.referee import compare
from fedloom.reviews.evidence.trace import Trace
from fedloom.rounds.checkpoint import RoundLog
from fedloom.rounds.schedule import Schedule
from fedloom.runs.config_file import configuration
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import RunDirectory, read_json, readable
from fedloom.runs.events import RunName
from fedloom.runs.identity import environment, task_digests, version_changes
from fedloom.state.digest import Checksum
from fedloom.state.tensors import read_tensors
from fedloom.study.jobs import RunJob
from fedloom.task import Task

NO_RUNS = "the bundle holds no runs: there is nothing to check"

ANSWERS = ("the same bytes", "the same to float tolerance", "within the seeds' spread", "different")

FIGURES, SAMPLES, WEIGHTS = 1e-3, 3, 1e-2
"""Float tolerance: a figure may differ by this share and by so many test samples, a tensor of the
final model by that share.
"""

_KEYS = {"algorithm", "model", "objective", "metrics", "data", "training", "record", "plugins"}
# engines that a bundle may name: a cluster is the user's choice
_LOCAL = ("rows", "stacked", "processes")
_SAME = ("metrics.jsonl", "clients.jsonl", "recorded.jsonl", "model.safetensors")


@dataclass(frozen=True)
class ReplayedCell:
    """A method in a setting: the mean last figure of its seeds in the bundle and here, the answer,
    and where runs part.
    """

    setting: str
    algorithm: str
    seeds: int
    bundled: float
    here: float
    answer: str
    detail: str


@dataclass(frozen=True)
class Replay:
    """The runs of a bundle, unpacked in `directory/bundle`, to be made again with data from folders
    by the name of their set.
    """

    bundle: Bundle
    directory: Path
    folders: Mapping[str, str]

    def __post_init__(self) -> None:
        if not self.bundle.runs:
            raise InvalidValue(NO_RUNS)

    def described(self) -> list[str]:
        """Return what will be done, how long it may take, and what has changed since, a line each."""
        cells = {(run.setting, run.algorithm) for run in self.bundle.runs}
        data = sorted({job.configuration.data.name for job in self.jobs})
        rounds = sum(job.configuration.rounds for job in self.jobs)
        seconds = sum(
            float(self._stored(k, "result").get("seconds") or 0) for k in range(len(self.jobs))
        )
        changes = self._changes(0)
        machine = f"made with {one_line(changes)}: the last digits may differ"
        return [
            f"{self.bundle.title}: {len(cells)} cells, {len(self.jobs)} runs, {rounds:,} rounds, on {', '.join(data)}",
            f"it took {time_text(seconds)} where it was made; runs go to {self.directory}",
            machine if changes else "the same versions and processor",
        ]

    def _changes(self, number: int) -> str:
        """Return which versions and which processor of a run differ here; "" if none do."""
        stored, present = self._stored(number, "environment"), environment()
        changes = version_changes(stored | {"threads": present["threads"]}, present)
        if stored.get("processor") != present["processor"]:
            changes = f"{changes}{', ' if changes else ''}{stored.get('processor')} (now {present['processor']})"
        return changes

    @cached_property
    def jobs(self) -> list[RunJob]:
        """The runs. Raises `InvalidValue` for a configuration that this version does not have."""
        jobs = []
        for number, run in enumerate(self.bundle.runs):
            try:
                configured = self._configured(number)
                name = RunName(configured.only_method("replay"), run.seed, run.setting)
            except FedloomError as error:
                raise InvalidValue(
                    f"{run.algorithm}: {error} (bundled by fedloom {self.bundle.fedloom})"
                ) from None
            jobs.append(RunJob(configured, name, self.directory / str(number)))
        return jobs

    def _stored(self, number: int, name: str) -> dict[str, Any]:
        return read_json(self._paths(number)[0] / f"{name}.json", dict, "the bundle is of no use")

    def _paths(self, number: int) -> tuple[Path, Path]:
        return self.directory / "bundle" / "runs" / str(number), self.directory / str(number)

    def _configured(self, number: int) -> Configuration:
        """Return a run's configuration with data of this machine; only keys on which figures depend
        are taken over.
        """
        stored = relocated(self._stored(number, "configuration"), self._locate)
        keys = _KEYS | {entry.name for entry in fields(Schedule)}
        table = {key: value for key, value in stored.items() if key in keys and value is not None}
        table["data"] = _offline_names(table["data"])
        choice = RunDirectory(self._paths(number)[0]).engine  # a rule would look at this machine
        engine = choice.name if choice else str(stored.get("engine"))
        if engine.partition("(")[0] in _LOCAL:
            table["engine"] = engine
        threads = int(self._stored(number, "environment").get("threads") or 1)
        table["threads"] = max(1, min(threads, os.cpu_count() or 1))
        return configuration({**table, "name": "replay", "directory": str(self.directory)})

    def _locate(self, name: str, parameter: str, stored: str) -> str | None:
        """Return the location of a file or folder here; None for the folder of all data."""
        location = self.folders.get(name)
        if location is None and parameter != "folder":
            raise InvalidValue(
                f"{name} reads {Path(stored).name!r}, which no bundle holds: give --data {name}=FOLDER"
            )
        if location is None or parameter == "folder" or Path(location).is_file():
            return location
        if Path(stored).name in ("", ".."):
            raise InvalidValue(f"{name} reads {quoted(stored)}, which is no file")
        return str(Path(location) / Path(stored).name)

    def differing(self, number: int, task: Task) -> list[str]:
        """Return what differs of the task of a run, `split` or `start`. Raise `InvalidValue` where
        its data do.
        """
        stored, present = self._stored(number, "task").get("digests") or {}, task_digests(task)
        differing = [name for name in present if name in stored and stored[name] != present[name]]
        if "data" in differing:
            raise InvalidValue(f"{task.dataset.name}: the data here are not those of the bundle")
        return differing

    def cells(self) -> list[ReplayedCell]:
        """Return the answer for each method in each setting. Raises `CheckpointError` for damaged
        files.
        """
        numbers: dict[tuple[str, str], list[int]] = {}
        for number, run in enumerate(self.bundle.runs):
            numbers.setdefault((run.setting, run.algorithm), []).append(number)
        return [self._cell(*key, group) for key, group in numbers.items()]

    def _cell(self, setting: str, algorithm: str, numbers: Sequence[int]) -> ReplayedCell:
        # The replay's own metric and spread: the bundle may claim any.
        metric = read_json(self._paths(numbers[0])[1] / "task.json", dict)["metric"]["name"]
        bundled, here = (
            [_final(self._paths(number)[k], metric) for number in numbers] for k in (0, 1)
        )
        spread = 2 * stdev(here) if len(numbers) > 1 else 0.0
        worst, detail = 0, ""
        for number, a, b in zip(numbers, bundled, here, strict=True):
            rank, figure, location = self._outcome(number)
            if figure and 0 < spread >= abs(b - a) and self._changes(number):
                rank = 2
            if rank > worst:
                worst, detail = rank, one_line("; ".join(filter(None, (figure, location))))
        return ReplayedCell(
            setting,
            self._shown(algorithm, numbers[0]),
            len(numbers),
            mean(bundled),
            mean(here),
            ANSWERS[worst],
            detail,
        )

    def _shown(self, label: str, number: int) -> str:
        """Return the bundle's name of a method, with the method where it is another."""
        job = self.jobs[number]
        method = str(job.configuration.method(job.name.algorithm))
        with suppress(FedloomError):
            if str(job.configuration.method(label)) == method:
                return label
        return f"{label}: {method}"

    def _outcome(self, number: int) -> tuple[int, str, str]:
        """Return the index of a run's answer, the first figure that differs, and where in the
        training or the model.
        """
        bundled, replayed = self._paths(number)
        with readable(bundled):
            a, b = ([_checksum(path / name) for name in _SAME] for path in (bundled, replayed))
            if a[-1] is None:  # the model is too large for a bundle
                a[-1] = self._stored(number, "result").get("files", {}).get(_SAME[-1])
            if a == b:
                return 0, "", ""
            claimed, task = self._stored(number, "task"), read_json(replayed / "task.json", dict)
            slack = SAMPLES / max(1, int(task["test_samples"]))
            figure = next(
                (
                    f"{name} {claimed.get(name)!s:.40}, here {task[name]}"
                    for name in ("train_samples", "test_samples")
                    if claimed.get(name) != task[name]
                ),
                "",
            )
            for log in ("metrics.jsonl", "clients.jsonl"):
                records = (RoundLog(path / log).read() for path in (bundled, replayed))
                pairs = zip_longest(*records, fillvalue=dict[str, Any]())
                texts = (_differing(x, y, slack) for x, y in pairs)
                figure = figure or next(filter(None, texts), "")
            share, tensor = _furthest(bundled, replayed)
            if not figure and share <= WEIGHTS:
                return 1, "", ""
            if (bundled / "recorded").exists() and (
                difference := compare(Trace(bundled), Trace(replayed))
            ):
                return 3, figure, f"first in {difference[0]}, {difference[1]}"
            return 3, figure, f"the final model differs most in {tensor}, by {share:.1g} of it"


def _offline(value: Any) -> Any:
    """Return an expression of a data set, in which nothing asks the network."""

    def change(call: Call) -> dict[str, Any]:
        asks = call.name in datasets and "hub" in datasets[call.name].parameters
        return call.named | {"hub": False} if asks else call.named

    return rewritten(value, change)


def _offline_names(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _offline(value) for key, value in data.items()}


def _final(path: Path, name: str) -> float:
    with readable(path):
        return [
            float(line[name])
            for line in RoundLog(path / "metrics.jsonl").read()
            if line.get(name) is not None
        ][-1]


def _checksum(path: Path) -> str | None:
    return Checksum(path.read_bytes()).hexdigest() if path.exists() else None


def _differing(bundled: Mapping[str, Any], replayed: Mapping[str, Any], slack: float) -> str:
    """Return the first figure of a round that differs beyond float tolerance, with both values; ""
    where none does.
    """
    for name in bundled or replayed:
        a, b = bundled.get(name), replayed.get(name)
        if a != b and not _close(a, b, slack):
            return f"from round {(bundled or replayed)['round']} on: {name} {str(a)[:40]}, here {str(b)[:40]}"
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
