"""Several methods with several seeds on the same data, splits and initial models, a few runs at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.algorithm import build
from fedloom.engines.local import RowsEngine
from fedloom.errors import InvalidValue
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.directory import to_json
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.run import run_directory
from fedloom.experiment.workers import attempt, run_in_workers
from fedloom.expression import parse
from fedloom.federation import Federation
from fedloom.files import write_text
from fedloom.recording.recorder import build_recorders
from fedloom.recording.recording import Recording
from fedloom.report import summary as figures
from fedloom.report import write_report
from fedloom.report.summary import Row, RunSummary, summarise
from fedloom.report.tables import to_csv
from fedloom.task import Task, make_dataset


@dataclass(frozen=True)
class Comparison:
    """The runs of a configuration, method by method within each seed."""

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
        return cls(configuration, tuple(RunName(str(parse(text)), seed) for seed in seeds for text in methods), command)

    def run(
        self, watch: Watch, *, fresh: bool = False, stopped: Callable[[], bool] = lambda: False
    ) -> dict[RunName, str]:
        """Run what is not finished yet and write the figures of all; returns what went wrong, by run.

        A run that fails does not keep the others from running. `watch` hears of every round; when `stopped` says so, every
        run under way finishes its round, and `KeyboardInterrupt` is raised. Whatever is wrong with the configuration of
        any run is raised before the first round of any.
        """
        waiting, tasks = self._check(fresh)
        for name in self.names:
            if name not in waiting:
                watch(Event("skipped", name, self.configuration.schedule.rounds))
        if self.configuration.workers > 1 and len(waiting) > 1:
            failed = run_in_workers(self.configuration, waiting, watch, fresh, stopped)
        else:
            failed = self._run_here(waiting, watch, fresh, stopped, tasks)
        self.write(self.summaries(failed), failed)
        return failed

    def summaries(self, failed: dict[RunName, str]) -> list[RunSummary]:
        """The figures of the runs that came to their end."""
        done = [name for name in self.names if name not in failed]
        return [run_directory(self.configuration, *name).summary(name.algorithm) for name in done]

    def rows(self, summaries: Sequence[RunSummary]) -> list[Row]:
        """One row a method."""
        return summarise(summaries, self.configuration.targets)

    def write(self, summaries: Sequence[RunSummary], failed: dict[RunName, str]) -> None:
        """Write the figures as `comparison.json` and `comparison.csv`, and `report.html`."""
        folder, rows = self.configuration.folder, self.rows(summaries)
        runs = [self._figures(run) for run in summaries]
        failures = [{"algorithm": name.algorithm, "seed": name.seed, "reason": text} for name, text in failed.items()]
        found = {"methods": [dataclasses.asdict(row) for row in rows], "runs": runs, "failed": failures}
        write_text(folder / "comparison.json", to_json(found))
        write_text(folder / "comparison.csv", to_csv(rows))
        if summaries:
            write_report(
                folder / "report.html", self.configuration.name, summaries, self.configuration.targets, self.command
            )

    def _figures(self, run: RunSummary) -> dict[str, Any]:
        return {
            "algorithm": run.algorithm,
            "seed": run.seed,
            "accuracy": figures.final(run),
            "best_accuracy": figures.best(run),
            "rounds_to": {f"{target:g}": figures.rounds_to(run, target) for target in self.configuration.targets},
            "bytes_down": figures.bytes_down(run),
            "bytes_up": figures.bytes_up(run),
            "seconds": figures.seconds(run),
            "directory": str(run_directory(self.configuration, run.algorithm, run.seed).path),
        }

    def _check(self, fresh: bool) -> tuple[list[RunName], dict[int, Task]]:
        """Make the task of every seed and set every method up once; returns the runs to make and the tasks of their seeds."""
        places = {name: run_directory(self.configuration, *name) for name in self.names}
        if not fresh:
            for name, place in places.items():
                place.require(self.configuration.resolved(*name))
        waiting = [name for name, place in places.items() if fresh or not place.finished]
        if not waiting:
            return [], {}
        dataset = make_dataset(self.configuration.data.name)
        tasks = {seed: self.configuration.task(seed, dataset) for seed in dict.fromkeys(name.seed for name in waiting)}
        for name in waiting:
            if name.seed == waiting[0].seed:
                task, schedule = tasks[name.seed], dataclasses.replace(self.configuration.schedule, seed=name.seed)
                recording = Recording(build_recorders(self.configuration.record))
                Federation(build(name.algorithm), task, RowsEngine(task), schedule, observers=[recording])
        return waiting, tasks

    def _run_here(
        self, waiting: Sequence[RunName], watch: Watch, fresh: bool, stopped: Callable[[], bool], tasks: dict[int, Task]
    ) -> dict[RunName, str]:
        def passing(event: Event) -> None:
            watch(event)
            if stopped():
                raise KeyboardInterrupt

        failed: dict[RunName, str] = {}
        for name in waiting:
            reason = attempt(self.configuration, name, passing, fresh, tasks.__getitem__)
            if reason is not None:
                failed[name] = reason
        return failed
