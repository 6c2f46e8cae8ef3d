"""Several methods in several settings with several seeds, on the same data, splits and initial models, a few runs at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedloom.config.expression import parse
from fedloom.errors import InvalidValue
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.directory import locked, setting_folder, write_json
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.finished import REPORT_LOCK, StoredRun, by_setting, compared, write_reports
from fedloom.experiment.jobs import Job, Tasks, placed, require_possible
from fedloom.experiment.pools import make_pool
from fedloom.experiment.trajectories import context_of, draw_joint_trajectories
from fedloom.report import summary as figures
from fedloom.report.export import differences_to_csv, to_csv, to_data, to_latex, to_markdown
from fedloom.report.page import ReportOptions
from fedloom.report.sheet import Sheet
from fedloom.state.files import remove_unfinished, write_text

Failures = Mapping[RunName, str]
"""The reason why a run failed, on one line, by run."""


@dataclass(frozen=True)
class Comparison:
    """The runs of a configuration: setting by setting, method by method within each seed."""

    configuration: Configuration
    names: tuple[RunName, ...]
    command: str = ""  # the line that makes it again, for the report

    @classmethod
    def of(cls, configuration: Configuration, command: str = "") -> Comparison:
        """Return the runs that a configuration asks for. Raise `InvalidValue` when it names no method."""
        if not configuration.methods:
            raise InvalidValue('nothing to compare: give algorithms, such as algorithms = ["fedavg", "fedmr"]')
        seeds = configuration.seeds or [configuration.seed]
        names = (
            RunName(str(parse(text)), seed, setting)
            for setting in configuration.settings
            for seed in seeds
            for text in configuration.methods
        )
        return cls(configuration, tuple(names), command)

    def run(
        self,
        watch: Watch,
        *,
        fresh: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[RunName, str]:
        """Run what is not finished, write the figures of all, and return why runs failed, which stops no other."""
        jobs = placed(self.configuration, self.names, reuse=not fresh)
        if not fresh:
            for job in jobs:
                job.require()
        waiting, tasks = [job for job in jobs if fresh or not job.finished], Tasks()
        require_possible(waiting, tasks)
        for job in jobs:
            if job not in waiting:
                watch(Event("skipped", job.name, job.configuration.rounds))
        with closing(make_pool(self.configuration, len(jobs), len(waiting), tasks)) as pool:
            failed = pool.run(waiting, watch, fresh, stopped)
        self.write(failed)
        return failed

    def jobs(self) -> list[Job]:
        """Return every run with its directory."""
        return placed(self.configuration, self.names)

    def stored(self, failed: Failures) -> list[StoredRun]:
        """Read the runs that came to their end."""
        return [
            StoredRun(job.name.setting, job.path, job.summary(), self._changes(job.name.setting))
            for job in self.jobs()
            if job.name not in failed
        ]

    def sheets(self, failed: Failures) -> list[Sheet]:
        """Return a sheet for each setting with at least one run: its methods, and which differences are significant."""
        return compared(self.stored(failed), self._options)

    def write(self, failed: Failures) -> None:
        """Write tables, tests and reports. One process at a time does, so that the files belong together."""
        folder, title = self.configuration.folder, self.configuration.name
        with locked(folder / REPORT_LOCK, wait=True):
            remove_unfinished(folder)
            stored = self.stored(failed)
            sheets = compared(stored, self._options)
            failures = [
                {"algorithm": name.algorithm, "seed": name.seed, "setting": self._changes(name.setting), "reason": text}
                for name, text in failed.items()
            ]
            runs = [self._figures(run) for run in stored]
            write_json(folder / "comparison.json", {**to_data(sheets), "runs": runs, "failed": failures})
            write_text(folder / "comparison.csv", to_csv(sheets))
            write_text(folder / "comparison.md", to_markdown(sheets, title))
            write_text(folder / "comparison.tex", to_latex(sheets, title))
            write_text(folder / "differences.csv", differences_to_csv(sheets))
            for setting, group in by_setting(stored).items():
                context = partial(context_of, self.configuration.settings[setting])
                summaries = [(run.path, run.summary) for run in group]
                draw_joint_trajectories(setting_folder(folder, setting), summaries, context)
            write_reports(folder, stored, self._options)

    @property
    def _options(self) -> ReportOptions:
        plan = self.configuration
        return ReportOptions(plan.name, tuple(plan.targets), self.command, plan.last, plan.against, plan.measure)

    def _changes(self, setting: str) -> dict[str, Any]:
        return self.configuration.settings[setting].changes

    def _figures(self, run: StoredRun) -> dict[str, Any]:
        summary, targets = run.summary, self.configuration.targets
        return {
            "algorithm": summary.algorithm,
            "seed": summary.seed,
            "setting": run.changes,
            summary.metric.name: figures.final(summary),
            f"best_{summary.metric.name}": figures.best(summary),
            "mean_of_last": figures.mean_of_last(summary, self.configuration.last),
            f"personal_{summary.metric.name}": figures.personal(summary),
            **{
                f"{cost}_to": {
                    figures.target_key(target): figures.measured(summary, cost, target=target) for target in targets
                }
                for cost in figures.TO_TARGET
            },
            "bytes_down": figures.bytes_down(summary),
            "bytes_up": figures.bytes_up(summary),
            "seconds": figures.seconds(summary),
            "simulated_seconds": figures.simulated_seconds(summary),
            "directory": str(run.path),
        }
