"""Several methods in several settings with several seeds, on the same data, splits and initial
models, a few runs at a time.
"""

import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from fedloom.config.expression import parse
from fedloom.errors import InvalidValue
from fedloom.method import Method
from fedloom.parts.building import build
from fedloom.report.page import ReportOptions
from fedloom.rounds.clock import Clock
from fedloom.rounds.schedule import Schedule, Stop
from fedloom.runs.configuration import Configuration, configuration
from fedloom.runs.directory import finished_runs
from fedloom.runs.events import RunName, Watch
from fedloom.runs.progress import progress
from fedloom.runs.python_objects import PythonObjects, TaskOf
from fedloom.runs.settings import require_key
from fedloom.study.comparison_result import ComparisonResult
from fedloom.study.cores import runs_side_by_side
from fedloom.study.finished import StoredRun
from fedloom.study.jobs import RunJob, Tasks, job_of, require_possible, unfinished
from fedloom.study.pools import make_pool


@dataclass(frozen=True)
class Comparison:
    """The runs of a configuration: setting by setting, method by method within each seed."""

    configuration: Configuration
    names: tuple[RunName, ...]
    command: str = ""  # the line that makes it again, for the report

    @classmethod
    def of(cls, configuration: Configuration, command: str = "") -> "Comparison":
        """Return the runs that a configuration asks for. Raise `InvalidValue` when it names no
        method.
        """
        if not configuration.methods:
            raise InvalidValue(
                'nothing to compare: give algorithms, such as algorithms = ["fedavg", "fedmr"]'
            )
        seeds = configuration.seeds or [configuration.seed]
        names = (
            RunName(text if configuration.labelled(text) else str(parse(text)), seed, setting)
            for setting in configuration.settings
            for seed in seeds
            for text in configuration.methods
        )
        return cls(configuration, tuple(names), command)

    @property
    def side_by_side(self) -> "Comparison":
        """The comparison with as many runs at a time as this machine has room for."""
        workers = runs_side_by_side(self.configuration, len(self.names))
        return replace(self, configuration=replace(self.configuration, workers=workers))

    @property
    def rounds(self) -> dict[RunName, int]:
        return {name: self.configuration.settings[name.setting].rounds for name in self.names}

    def run(
        self,
        watch: Watch,
        *,
        fresh: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[RunName, str]:
        """Run what is not finished, write the figures of all, and return why runs failed, which
        stops no other.
        """
        jobs = self.jobs(reuse=not fresh)
        waiting, tasks = unfinished(jobs, watch, fresh), Tasks()
        require_possible(waiting, tasks)
        with closing(make_pool(self.configuration, len(jobs), len(waiting), tasks)) as pool:
            failed = pool.run(waiting, watch, fresh, stopped)
        self.result(failed).write(self.configuration)
        return failed

    def jobs(self, *, reuse: bool = True) -> list[RunJob]:
        """Return every run with its directory; with `reuse`, a finished one with the same
        configuration stands for it.
        """
        finished = finished_runs(self.configuration.folder) if reuse else {}
        return [
            job_of(self.configuration.settings[name.setting], name, finished) for name in self.names
        ]

    def result(self, failed: Mapping[RunName, str]) -> ComparisonResult:
        """Read the runs that came to their end; `failed` says why others did not."""
        plan = self.configuration
        runs = [
            StoredRun(
                job.name.setting, job.path, job.summary(), plan.settings[job.name.setting].changes
            )
            for job in self.jobs()
            if job.name not in failed
        ]
        options = ReportOptions(
            plan.name, tuple(plan.targets), self.command, plan.last, plan.against, plan.measure
        )
        return ComparisonResult(plan.folder, runs, options, failed)


def compare(
    methods: Mapping[str, Method | str] | Sequence[Method | str],
    task: TaskOf,
    *,
    seeds: Iterable[int] = (0,),
    directory: str | Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
    **options: Any,
) -> ComparisonResult:
    """Compare methods over several seeds, as `fedloom compare` does: a few runs at a time, resumed,
    tested in pairs.

    Args:
        methods: Methods by label, such as `{"FedAvg": "fedavg", "mine": Mine(step=0.5)}`, or a list
            of them.
        task: The task, whose data, split and initial model are those of every seed; or a function
            from a seed to a task, which draws these anew.
        seeds: The seeds, such as `range(5)`. More of them later repeat nothing.
        directory: Folder of the runs. The same call goes on where it was interrupted and reads
            finished runs; with more `rounds` it lengthens them. By default a folder that is removed
            with the result.
        fresh: Start all runs again.
        quiet: Show no progress.
        **options: Fields of the `Schedule`, such as `rounds=50`, and other keys of a configuration,
            such as `targets`.

    Returns:
        The runs as tables, frames, figures and tests. What failed is in `failed`.

    Raises:
        InvalidValue: An argument is out of range, or a method does not fit the task.
        CheckpointError: The folder holds another comparison, or a damaged run.
    """
    objects = PythonObjects(labelled(methods), task)
    plan = replace(configuration(python_table(objects, seeds, directory, options)), objects=objects)
    comparison = Comparison.of(plan).side_by_side
    with progress(len(comparison.names), comparison.rounds, quiet) as watch:
        failed = comparison.run(watch, fresh=fresh)
    result = comparison.result(failed)
    if directory is None:
        weakref.finalize(result, rmtree, result.folder, ignore_errors=True)
    return result


_OPTIONS = (
    *(name for name in Schedule.__dataclass_fields__ if name != "seed"),
    "name", "targets", "last", "against", "measure", "record", "trackers", "engine", "workers", "threads", "pool",
)  # fmt: skip
"""Keys of a configuration that are no part of the task."""


def python_table(
    objects: PythonObjects,
    seeds: Iterable[int],
    directory: str | Path | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the table of the configuration of runs in Python. Raises `InvalidValue` for a wrong
    option.
    """
    for key in options:
        require_key(key, _OPTIONS)
    seeds = list(seeds)
    if not seeds:
        raise InvalidValue("nothing to run: give at least one seed")
    task = objects.task(seeds[0])
    personal = (
        {"measure": "personal"}
        if options.get("personal_every") and task.local_test is not None
        else {}
    )
    if options.get("measure") == "personal" and task.local_test is None:
        raise InvalidValue(
            "measure = 'personal' needs test data of the clients' own: give the task local_test=0.25"
        )
    folder = tempfile.mkdtemp(prefix="fedloom-") if directory is None else str(directory)
    table = {
        key: asdict(value) if isinstance(value, Clock | Stop) else value
        for key, value in options.items()
    }
    table |= {"seeds": seeds, "directory": folder, "device": str(task.initial.device)}
    return {"name": Path(folder).name, **personal, **table}


def labelled(methods: Mapping[str, Method | str] | Sequence[Method | str]) -> dict[str, Method]:
    """Return methods by label, by default their expression. Raises as `build`."""
    if isinstance(methods, Mapping):
        return {name: build(method) for name, method in methods.items()}
    built = [
        build(method) for method in ([methods] if isinstance(methods, str | Method) else methods)
    ]
    return {str(method): method for method in built}
