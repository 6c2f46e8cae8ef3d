"""The runs that an experiment has to make, each where it lies; checked before the first round of any, and made here."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedloom.algorithm import build
from fedloom.data.dataset import Dataset
from fedloom.engines.rows import RowsEngine
from fedloom.errors import FedloomError, InvalidValue, error_text, located
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.directory import RunDirectory, fingerprint, finished_runs
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.run import run_configured, run_directory
from fedloom.recording.recorder import build_recorders
from fedloom.recording.run_recording import Recording
from fedloom.report.summary import RunSummary
from fedloom.rounds.federation import Federation
from fedloom.task import Task, make_dataset

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_KEPT = 4
"""Tasks and data sets that are kept in memory for the next run."""


@dataclass(frozen=True)
class Job:
    """One run to make: the configuration of its setting, its name, and the directory it lies in."""

    configuration: Configuration
    name: RunName
    path: Path

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return RunDirectory(self.path).ended(self._resolved)

    def require(self) -> None:
        """Raise `CheckpointError` where the directory holds a run that cannot become this one."""
        RunDirectory(self.path).require(self._resolved, build(self.name.algorithm))

    @property
    def _resolved(self) -> dict[str, Any]:
        return self.configuration.resolved(self.name.algorithm, self.name.seed)

    def summary(self) -> RunSummary:
        """The figures of the run so far."""
        return RunDirectory(self.path).summary(self.name.algorithm)


def placed(configuration: Configuration, names: Iterable[RunName], *, reuse: bool = True) -> list[Job]:
    """The jobs of these runs. A run that was finished before with the same resolved configuration, under whatever setting of
    this experiment, is found again where it lies (unless not `reuse`)."""
    known = finished_runs(configuration.folder) if reuse else {}
    return [job_of(configuration.settings[name.setting], name, known) for name in names]


def job_of(configuration: Configuration, name: RunName, known: Mapping[str, Sequence[Path]]) -> Job:
    """The job of a run whose setting has this configuration; `known` are the `finished_runs` to find it among."""
    usual = run_directory(configuration, *name).path
    found = known.get(fingerprint(configuration.resolved(name.algorithm, name.seed)), [])
    return Job(configuration, name, found[0] if found and usual not in found else usual)


def require_possible(jobs: Sequence[Job], tasks: Tasks) -> None:
    """Make the task of every setting and seed, and set up every method once in every setting.

    So whatever is wrong with any run is raised, with its setting, before the first round of any.
    """
    seen: dict[str, int] = {}
    for job in jobs:
        configuration, name = job.configuration, job.name
        try:
            task = tasks.of(configuration, name.seed)
            if seen.setdefault(name.setting, name.seed) == name.seed:
                schedule = dataclasses.replace(configuration.schedule, seed=name.seed)
                recording = Recording(build_recorders(configuration.record))
                Federation(build(name.algorithm), task, RowsEngine(task), schedule, observers=[recording])
        except FedloomError as error:
            if not name.setting:
                raise
            raise InvalidValue(f"settings, {name.setting}: {error}") from None


class Tasks:
    """Tasks by setting and seed; the latest few are kept, and the data sets they are made of."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[tuple[str, int], Task] = OrderedDict()
        self._sets: OrderedDict[str, Dataset] = OrderedDict()

    def of(self, configuration: Configuration, seed: int) -> Task:
        """The task of a seed. Raises `FedloomError` where there is none."""
        key = (f"{configuration.data} {configuration.model} {configuration.training}", seed)
        if key not in self._tasks:
            self._tasks[key] = configuration.task(seed, self._dataset(configuration.data.name))
        return _latest(self._tasks, key)

    def _dataset(self, name: str) -> Dataset:
        if name not in self._sets:
            self._sets[name] = make_dataset(name)
        return _latest(self._sets, name)


def _latest(kept: OrderedDict[_Key, _Value], key: _Key) -> _Value:
    """The value of a key, which is now the latest; older ones are forgotten."""
    kept.move_to_end(key)
    while len(kept) > _KEPT:
        kept.popitem(last=False)
    return kept[key]


def attempt(job: Job, watch: Watch, fresh: bool, tasks: Tasks) -> str | None:
    """Make one run; what went wrong, on one line, or None. With FEDLOOM_TRACEBACK set, where it went wrong is printed too."""

    def make_task(seed: int) -> Task:
        return tasks.of(job.configuration, seed)

    try:
        run_configured(job.configuration, job.name, watch, fresh=fresh, make_task=make_task, path=job.path, alone=False)
    except Exception as error:
        if "FEDLOOM_TRACEBACK" in os.environ:
            traceback.print_exc()
        text = " ".join(str(error).split()) if isinstance(error, FedloomError) else error_text(error)
        reason = located(error, text)
        watch(Event("failed", job.name, text=reason))
        return reason
    return None
