"""Replays: the runs of a bundle made again here, and how the figures compare cell by cell, a method
in a setting each.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedloom.common.errors import FedloomError, InvalidValue, one_line, quoted
from fedloom.common.expression import Call
from fedloom.data.dataset import datasets
from fedloom.report.units import time_text
from fedloom.reviews.evidence.answers import ANSWERS, bundled_json, final_figure, outcome
from fedloom.reviews.evidence.bundle import Bundle, relocated, rewritten
from fedloom.rounds.schedule import Schedule
from fedloom.runs.config_file import configuration
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import RunDirectory, read_json
from fedloom.runs.events import RunName
from fedloom.runs.identity import environment, task_digests, version_changes
from fedloom.study.jobs import RunJob
from fedloom.task import Task

NO_RUNS = "the bundle holds no runs: there is nothing to check"

_KEYS = {"algorithm", "model", "objective", "metrics", "data", "training", "record", "plugins"}
# engines that a bundle may name: a cluster is the user's choice
_LOCAL = ("rows", "stacked", "processes")


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
        """Return a line each about the runs, their time, and the versions that have changed."""
        cells = {(run.setting, run.algorithm) for run in self.bundle.runs}
        data = sorted({job.configuration.data.name for job in self.jobs})
        rounds = sum(job.configuration.rounds for job in self.jobs)
        seconds = sum(
            float(self._stored(k, "result").get("seconds") or 0) for k in range(len(self.jobs))
        )
        changes = self._changes(0)
        machine = f"made with {one_line(changes)}: the last digits may differ"
        return [
            f"{self.bundle.title}: {len(cells)} cells, {len(self.jobs)} runs, {rounds:,} "
            f"rounds, on {', '.join(data)}",
            f"it took {time_text(seconds)} where it was made; runs go to {self.directory}",
            machine if changes else "the same versions and processor",
        ]

    def _changes(self, number: int) -> str:
        """Return which versions and which processor of a run differ here; "" if none do."""
        stored = self._stored(number, "environment")
        present = environment()
        changes = version_changes(stored | {"threads": present["threads"]}, present)
        if stored.get("processor") != present["processor"]:
            changes = (
                f"{changes}{', ' if changes else ''}{stored.get('processor')} (now "
                f"{present['processor']})"
            )
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
        return bundled_json(self._paths(number)[0], name)

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
                f"{name} reads {Path(stored).name!r}, which no bundle holds: give --data "
                f"{name}=FOLDER"
            )
        if location is None or parameter == "folder" or Path(location).is_file():
            return location
        if Path(stored).name in ("", ".."):
            raise InvalidValue(f"{name} reads {quoted(stored)}, not a file")
        return str(Path(location) / Path(stored).name)

    def differing(self, number: int, task: Task) -> list[str]:
        """Return the parts of the task that differ from the task of a run.

        Args:
            number: Number of the run in the bundle.
            task: The task as this machine makes it.

        Returns:
            `split`, `start`, both or none.

        Raises:
            InvalidValue: The data differ.
        """
        stored = self._stored(number, "task").get("digests") or {}
        present = task_digests(task)
        differing = [name for name in present if name in stored and stored[name] != present[name]]
        if "data" in differing:
            raise InvalidValue(f"{task.dataset.name}: the data differ from the bundle's data")
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
            [final_figure(self._paths(number)[k], metric) for number in numbers] for k in (0, 1)
        )
        spread = 2 * stdev(here) if len(numbers) > 1 else 0.0
        worst = 0
        detail = ""
        for number, a, b in zip(numbers, bundled, here, strict=True):
            rank, figure, location = outcome(*self._paths(number))
            if figure and 0 < spread >= abs(b - a) and self._changes(number):
                rank = 2
            if rank > worst:
                worst = rank
                detail = one_line("; ".join(filter(None, (figure, location))))
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


def _offline(value: Any) -> Any:
    """Return an expression of a data set that does not use the network."""

    def change(call: Call) -> dict[str, Any]:
        asks = call.name in datasets and "hub" in datasets[call.name].parameters
        return call.named | {"hub": False} if asks else call.named

    return rewritten(value, change)


def _offline_names(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _offline(value) for key, value in data.items()}
