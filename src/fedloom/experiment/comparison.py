"""Several methods in several settings with several seeds, on the same data, splits and initial models, a few runs at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.config.expression import parse
from fedloom.errors import InvalidValue
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.directory import to_json
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.jobs import Here, Job, Pool, Tasks, placed, require_possible
from fedloom.experiment.pages import setting_folder, write_pages
from fedloom.experiment.trajectories import draw_together, scene_of
from fedloom.experiment.workers import Crew
from fedloom.report import summary as figures
from fedloom.report.export import differences_to_csv, to_csv, to_data, to_latex, to_markdown
from fedloom.report.sheet import Sheet, sheet
from fedloom.report.summary import RunSummary
from fedloom.state.files import remove_unfinished, write_text

Failures = Mapping[RunName, str]
"""What went wrong, on one line, by run."""


@dataclass(frozen=True)
class Comparison:
    """The runs of a configuration: setting by setting, method by method within each seed."""

    configuration: Configuration
    names: tuple[RunName, ...]
    command: str = ""  # the line that makes it again, for the report

    @classmethod
    def of(cls, configuration: Configuration, command: str = "") -> Comparison:
        """The runs that a configuration asks for. Raises `InvalidValue` when it names no method."""
        methods = configuration.algorithms or ([] if configuration.algorithm is None else [configuration.algorithm])
        if not methods:
            raise InvalidValue('nothing to compare: give algorithms, such as algorithms = ["fedavg", "fedmr"]')
        seeds = configuration.seeds or [configuration.seed]
        names = (
            RunName(str(parse(text)), seed, setting)
            for setting in configuration.settings
            for seed in seeds
            for text in methods
        )
        return cls(configuration, tuple(names), command)

    def run(
        self, watch: Watch, *, fresh: bool = False, stopped: Callable[[], bool] = lambda: False
    ) -> dict[RunName, str]:
        """Run what is not finished yet and write the figures of all; returns what went wrong, by run.

        A run that fails does not keep the others from running. `watch` hears of every round; when `stopped` says so, every
        run under way finishes its round, and `KeyboardInterrupt` is raised. Whatever is wrong with the configuration of
        any run is raised before the first round of any.
        """
        jobs = placed(self.configuration, self.names, reuse=not fresh)
        if not fresh:
            for job in jobs:
                job.require()
        waiting, tasks = [job for job in jobs if fresh or not job.finished], Tasks()
        require_possible(waiting, tasks)
        for job in jobs:
            if job not in waiting:
                watch(Event("skipped", job.name, job.configuration.schedule.rounds))
        pool = make_pool(self.configuration, len(waiting), tasks)
        try:
            failed = pool.run(waiting, watch, fresh, stopped)
        finally:
            pool.close()
        self.write(failed)
        return failed

    def jobs(self) -> list[Job]:
        """Every run with the directory it lies in."""
        return placed(self.configuration, self.names)

    def summaries(self, failed: Failures, setting: str | None = None) -> list[RunSummary]:
        """The figures of the runs, in one setting or in all, that came to their end."""
        chosen = [job for job in self.jobs() if setting is None or job.name.setting == setting]
        return [job.summary() for job in chosen if job.name not in failed]

    def sheets(self, failed: Failures) -> list[Sheet]:
        """The methods of each setting with at least one run, and which of their differences are real."""
        jobs = [job for job in self.jobs() if job.name not in failed]
        return [
            self._sheet([job.summary() for job in jobs if job.name.setting == setting], setting)
            for setting in dict.fromkeys(job.name.setting for job in jobs)
        ]

    def write(self, failed: Failures) -> None:
        """Write the figures as `comparison.json`, `.csv`, `.md` and `.tex`, the tests as `differences.csv`, and a
        `report.html`; where there are settings, one over all of them and one in the folder of each."""
        folder, title = self.configuration.folder, self.configuration.name
        remove_unfinished(folder)
        done = [(job, job.summary()) for job in self.jobs() if job.name not in failed]
        settings = dict.fromkeys(job.name.setting for job, _ in done)
        parts = {setting: [run for job, run in done if job.name.setting == setting] for setting in settings}
        sheets = [self._sheet(runs, setting) for setting, runs in parts.items()]
        failures = [
            {"algorithm": name.algorithm, "seed": name.seed, "setting": self._changes(name.setting), "reason": text}
            for name, text in failed.items()
        ]
        runs = [self._figures(job, run) for job, run in done]
        write_text(folder / "comparison.json", to_json({**to_data(sheets), "runs": runs, "failed": failures}))
        write_text(folder / "comparison.csv", to_csv(sheets))
        write_text(folder / "comparison.md", to_markdown(sheets, title))
        write_text(folder / "comparison.tex", to_latex(sheets, title))
        write_text(folder / "differences.csv", differences_to_csv(sheets))
        shown = [self._together(setting, [job for job, _ in done]) for setting in parts]
        write_pages(folder, title, list(zip(sheets, shown, strict=True)), self.command)

    def _together(self, setting: str, jobs: Sequence[Job]) -> list[RunSummary]:
        """The runs of a setting, their clients' ways in one plane where several methods recorded them."""
        own = [(job.path, job.summary()) for job in jobs if job.name.setting == setting]
        place = setting_folder(self.configuration.folder, setting)
        return draw_together(place, own, lambda seed: scene_of(self.configuration.settings[setting], seed))

    def _sheet(self, runs: Sequence[RunSummary], setting: str) -> Sheet:
        told = self.configuration
        return sheet(
            runs,
            told.targets,
            last=told.last,
            against=told.against,
            measure=told.measure,
            setting=setting,
            changes=self._changes(setting),
        )

    def _changes(self, setting: str) -> dict[str, Any]:
        return self.configuration.settings[setting].changes

    def _figures(self, job: Job, run: RunSummary) -> dict[str, Any]:
        told = self.configuration
        return {
            "algorithm": run.algorithm,
            "seed": run.seed,
            "setting": self._changes(job.name.setting),
            "accuracy": figures.final(run),
            "best_accuracy": figures.best(run),
            "mean_of_last": figures.mean_of_last(run, told.last),
            "personal_accuracy": figures.personal(run),
            "rounds_to": {f"{target:g}": figures.rounds_to(run, target) for target in told.targets},
            "bytes_to": {f"{target:g}": figures.bytes_to(run, target) for target in told.targets},
            "bytes_down": figures.bytes_down(run),
            "bytes_up": figures.bytes_up(run),
            "seconds": figures.seconds(run),
            "directory": str(job.path),
        }


def make_pool(configuration: Configuration, runs: int, tasks: Tasks) -> Pool:
    """Where the runs of a configuration go on: in this process, in worker processes where there are several runs for them, or
    in Ray actors. Raises `MissingExtra` without Ray."""
    if configuration.pool != "processes" and runs > 0:
        from fedloom.experiment.ray_pool import RayPool  # an extra

        address = "local" if configuration.pool == "ray" else configuration.pool
        return RayPool(configuration.workers, configuration.threads, address)
    if configuration.workers > 1 and runs > 1:
        return Crew(configuration.workers, configuration.threads)
    return Here(tasks)
