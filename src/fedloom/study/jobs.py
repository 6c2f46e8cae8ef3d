"""The runs of an experiment as jobs: placed in their directories, checked before the first round of
any, and made.
"""

import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from fedloom.common.errors import FedloomError, InvalidValue, error_text, located
from fedloom.data.dataset import make_dataset
from fedloom.engines.rows import RowsEngine
from fedloom.recording.run_recording import Recording
from fedloom.report.summary import RunSummary
from fedloom.rounds.federation import Federation
from fedloom.runs.configuration import Configuration
from fedloom.runs.configured import run_configured, run_directory
from fedloom.runs.directory import RunDirectory, fingerprint
from fedloom.runs.events import Event, RunName, Watch
from fedloom.task import Task

_CACHED = 4
"""Tasks and data sets that stay in memory for the next run."""


@dataclass(frozen=True)
class RunJob:
    """One run to make: the configuration of its setting, its name, and its directory."""

    configuration: Configuration
    name: RunName
    path: Path

    @property
    def finished(self) -> bool:
        return RunDirectory(self.path).ended(self._resolved)

    def require(self) -> None:
        """Raise `CheckpointError` where the directory holds a run that cannot become this one."""
        RunDirectory(self.path).require(
            self._resolved, self.configuration.method(self.name.algorithm)
        )

    @cached_property
    def _resolved(self) -> dict[str, Any]:
        return self.configuration.resolved(self.name.algorithm, self.name.seed)

    def summary(self) -> RunSummary:
        return RunDirectory(self.path).summary(self.name.algorithm)


def job_of(
    configuration: Configuration, name: RunName, finished: Mapping[str, Sequence[Path]]
) -> RunJob:
    """Return the job of a run.

    Args:
        configuration: The configuration of the run's setting.
        name: Name of the run.
        finished: The `finished_runs` to reuse.

    Returns:
        The job, in the directory of an equal finished run if there is one.
    """
    configuration = configuration.of(name.algorithm)
    usual = run_directory(configuration, *name).path
    alike = finished.get(fingerprint(configuration.resolved(name.algorithm, name.seed)), [])
    return RunJob(configuration, name, alike[0] if alike and usual not in alike else usual)


def unfinished(jobs: Iterable[RunJob], watch: Watch, fresh: bool = False) -> list[RunJob]:
    """Return the unfinished runs.

    Args:
        jobs: All runs.
        watch: Called with an event for each finished run.
        fresh: Return all runs.

    Returns:
        The runs to make, in their order.

    Raises:
        CheckpointError: A directory holds a run that cannot be continued as this one.
    """
    waiting = []
    for job in jobs:
        if not fresh:
            job.require()
        if fresh or not job.finished:
            waiting.append(job)
        else:
            watch(Event("skipped", job.name, job.configuration.rounds))
    return waiting


def require_possible(jobs: Sequence[RunJob], tasks: "Tasks") -> None:
    """Make the task of every setting and seed, and set up every method.

    Errors then appear before the first round.

    Args:
        jobs: The runs to make.
        tasks: Cache of tasks, where the last ones remain for the runs.

    Raises:
        FedloomError: A task or a method cannot be made.
        InvalidValue: The same within a setting; the text names it.
    """
    seeds: dict[str, int] = {}
    for job in jobs:
        configuration, name = job.configuration, job.name
        try:
            task = tasks.of(configuration, name.seed)
            if seeds.setdefault(name.setting, name.seed) == name.seed:
                method, schedule = (
                    configuration.method(name.algorithm),
                    configuration.seeded(name.seed),
                )
                recording = Recording(configuration.recorders())
                Federation(method, task, RowsEngine(task), schedule, observers=[recording])
        except FedloomError as error:
            if not name.setting:
                raise
            raise InvalidValue(f"settings, {name.setting}: {error}") from None


class Tasks:
    """Cache of the tasks made last, by setting and seed, and of their data sets."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, int], Task] = {}
        self._dataset = lru_cache(_CACHED)(make_dataset)

    def of(self, configuration: Configuration, seed: int) -> Task:
        """Return the task of a seed, from the cache if it holds it.

        Args:
            configuration: Configuration of the run, of which only the data, the model and the
                training matter.
            seed: Seed of the split and of the initial weights.

        Returns:
            A task that the runs share. Raises as `make_task`.
        """
        objects = configuration.objects
        training = configuration.training if objects is None else objects.training
        key = (f"{configuration.data} {configuration.model} {training}", seed)
        if key not in self._tasks:
            self._tasks[key] = configuration.task(seed, self._dataset)
        if len(self._tasks) > _CACHED:
            del self._tasks[next(iter(self._tasks))]
        return self._tasks[key]


def attempt(job: RunJob, watch: Watch, fresh: bool, tasks: Tasks) -> str | None:
    """Make one run. FEDLOOM_TRACEBACK=1 prints the traceback of a failure.

    Args:
        job: The run.
        watch: Called with every event. A KeyboardInterrupt that it raises stops the run.
        fresh: Start the run again.
        tasks: Cache of tasks.

    Returns:
        The reason of a failure on one line, or None.
    """

    def make_task(seed: int) -> Task:
        return tasks.of(job.configuration, seed)

    try:
        run_configured(
            job.configuration,
            job.name,
            watch,
            fresh=fresh,
            make_task=make_task,
            path=job.path,
            alone=False,
        )
    except Exception as error:
        if "FEDLOOM_TRACEBACK" in os.environ:
            traceback.print_exc()
        text = (
            " ".join(str(error).split()) if isinstance(error, FedloomError) else error_text(error)
        )
        return located(error, text)
    return None
