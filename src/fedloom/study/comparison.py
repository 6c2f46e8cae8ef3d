"""Several methods in several settings with several seeds, on the same data, splits and initial
models, a few runs at a time.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from fedloom.common.errors import InvalidValue
from fedloom.common.expression import parse
from fedloom.report.sheet import ReportOptions
from fedloom.report.tuning_choice import TUNING
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import finished_runs, setting_folder
from fedloom.runs.events import RunName, Watch
from fedloom.study.comparison_result import ComparisonResult
from fedloom.study.cores import runs_side_by_side
from fedloom.study.jobs import RunJob, Tasks, job_of, require_possible, unfinished
from fedloom.study.pools import make_pool
from fedloom.study.stored_runs import StoredRun


@dataclass(frozen=True)
class Comparison:
    """The runs of a configuration: setting by setting, method by method within each seed."""

    configuration: Configuration
    names: tuple[RunName, ...]
    command: str = ""  # the line that makes it again, for the report

    @classmethod
    def of(cls, configuration: Configuration, command: str = "") -> "Comparison":
        """Return the runs of a configuration.

        Args:
            configuration: The methods, settings and seeds.
            command: The line that makes the comparison again, for the report; "" for none.

        Returns:
            The comparison, setting by setting, and in each setting seed by seed.

        Raises:
            InvalidValue: The configuration names no method.
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
        """The comparison with the number of parallel runs that fits this machine."""
        workers = runs_side_by_side(self.configuration, len(self.names))
        return replace(self, configuration=replace(self.configuration, workers=workers))

    @property
    def rounds(self) -> dict[RunName, int]:
        settings = self.configuration.settings
        return {name: settings[name.setting].of(name.algorithm).rounds for name in self.names}

    def run(
        self,
        watch: Watch,
        *,
        fresh: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[RunName, str]:
        """Make the unfinished runs and write the figures of all.

        Args:
            watch: Called with every event.
            fresh: Start all runs again.
            stopped: When it returns True, the runs in progress end after their rounds.

        Returns:
            The reasons of failed runs, which stop no other run.
        """
        jobs = self.jobs(reuse=not fresh)
        waiting, tasks = unfinished(jobs, watch, fresh), Tasks()
        require_possible(waiting, tasks)
        with closing(make_pool(self.configuration, len(jobs), len(waiting), tasks)) as pool:
            failed = pool.run(waiting, watch, fresh, stopped)
        if not any(setting.tuned for setting in self.configuration.settings.values()):
            for setting in self.configuration.settings:
                folder = setting_folder(self.configuration.folder, setting)
                (folder / TUNING).unlink(missing_ok=True)  # of an earlier comparison
        self.result(failed).write(self.configuration)
        return failed

    def jobs(self, *, reuse: bool = True) -> list[RunJob]:
        """Return every run with its directory; with `reuse` that of an equal finished run."""
        finished = finished_runs(self.configuration.folder) if reuse else {}
        settings = self.configuration.settings
        return [job_of(settings[name.setting], name, finished) for name in self.names]

    def result(self, failed: Mapping[RunName, str]) -> ComparisonResult:
        """Read the finished runs; `failed` holds the reasons of the others."""
        plan, runs = self.configuration, []
        for job in self.jobs():
            if job.name not in failed:
                setting = job.name.setting
                changes = plan.settings[setting].changes
                runs.append(StoredRun(setting, job.path, job.summary(), changes))
        options = ReportOptions(
            plan.name, tuple(plan.targets), self.command, plan.last, plan.against, plan.measure
        )
        return ComparisonResult(plan.folder, runs, options, failed)
