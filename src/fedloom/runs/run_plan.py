"""A run in progress: its task, its engine and its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.engines.base import Choice, LocalEngine
from fedloom.engines.choose import make_engine, without_placement
from fedloom.engines.rows import RowsEngine
from fedloom.engines.work import step_threads, using_threads
from fedloom.recording.run_recording import Recording
from fedloom.rounds.engine import Engine
from fedloom.rounds.federation import Federation
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import (
    RunDirectory,
    folder_name,
    setting_folder,
)
from fedloom.runs.events import Event, RunName, Watch
from fedloom.runs.identity import identity
from fedloom.runs.result import Result
from fedloom.runs.run_files import write_end, write_kept, write_start
from fedloom.runs.trackers.tracker import Tracker, Tracking
from fedloom.task import Task


@dataclass
class RunPlan:
    """A run that is about to begin.

    Attributes:
        configuration: The configuration.
        name: Name of the run.
        watch: Called with every event.
        directory: Directory of the run; None for a run in memory.
        fresh: Start again.
        trackers: Trackers, or their expressions.
        make_task: Makes the task of a seed; by default as configured.
        engine: Makes the engine; by default as configured.
        alone: False if other runs share the cores.
        hook: A `RoundHook`, which observes the rounds and reports each of them, or None.
    """

    configuration: Configuration
    name: RunName
    watch: Watch
    directory: RunDirectory | None
    fresh: bool = False
    trackers: Sequence[str | Tracker] = ()
    make_task: Callable[[int], Task] | None = None
    engine: Callable[[Task], Engine] | None = None
    alone: bool = True
    hook: Any = None

    def __post_init__(self) -> None:
        algorithm, seed, _ = self.name
        configuration = self.configuration = self.configuration.of(algorithm)
        self.method = configuration.method(algorithm)
        self.recorders = configuration.recorders()
        self.schedule = configuration.seeded(seed)
        self.resolved = configuration.resolved(algorithm, seed)
        if self.directory is not None and not self.fresh:
            self.resolved = self.directory.with_engine(self.resolved)

    def execute(self) -> Result:
        """Run the remaining rounds and write the files of the run.

        A finished run is only read.
        """
        configuration = self.configuration
        directory = self.directory
        task = (self.make_task or configuration.task)(self.name.seed)
        threads = configuration.threads or step_threads(task)
        notices = []
        if directory is not None:
            with using_threads(threads):  # the directory notes their number
                notices = directory.begin(self.resolved, self.method, self.fresh)
        over = directory is not None and directory.ended(self.resolved)
        # Engines that start processes see the threads of the configuration.
        with (
            using_threads(configuration.threads),
            closing(RowsEngine(task) if over else self._engine(task)) as engine,
            using_threads(threads),
        ):
            result = self._begin(task, engine, over)
            recorders = [] if result.recording is None else result.recording.notices
            for notice in [*notices, *result.federation.notices, *recorders]:
                self._notify(notice)
            reason = "" if result.engine.named else str(result.engine)
            finished = result.federation.finished
            self.watch(Event("started", self.name, finished, text=reason))
            path = None if directory is None else directory.path
            with Tracking(() if over else self.trackers, path, self._notify) as tracking:
                if finished and not over:
                    # The run may have ended between the checkpoint of a round and its model.
                    self._keep(result, finished)
                self._run_rounds(result, tracking)
                if directory is not None and not over:
                    write_end(result, directory, self._model_text(task))
                # This reads all figures: their directory may be gone later.
                tracking.finish(result.final_metrics)
        return result

    def _begin(self, task: Task, engine: Engine, over: bool) -> Result:
        """Set up the federation and write the first files of the run."""
        directory = self.directory
        resolved = self.resolved
        path = None
        digest = ""
        if directory is not None:
            path = directory.path
            digest = identity(task, resolved, self.method, self.configuration.clock)
        recording = Recording(self.recorders, path) if self.recorders else None
        observers: list[Any] = [] if recording is None else [recording]
        if self.hook is not None and self.hook.keeps_models:
            observers.append(self.hook)
        federation = Federation(self.method, task, engine, self.schedule, path, digest, observers)
        choice = engine.chosen if isinstance(engine, LocalEngine) else None
        if directory is not None and over:
            choice = directory.engine
        choice = choice or Choice(str(resolved["engine"]))
        if directory is not None and not over:
            directory.settle(resolved)
            write_start(task, directory.path, choice)
        if self.hook is not None and not self.hook.keeps_models:
            self.hook.begin(federation)
        return Result(federation, task, resolved, choice, recording)

    def _engine(self, task: Task) -> Engine:
        """Make the engine. A resumed run keeps its engine."""
        if self.engine is not None:
            return self.engine(task)
        named = self.configuration.engine
        resolved = str(self.resolved["engine"])
        hooked = any(r.hooks_training and not r.inapplicable(self.method) for r in self.recorders)
        return make_engine(
            named if without_placement(named) == resolved else resolved,
            task,
            self.schedule,
            in_process=hooked or not self.alone,
            algorithm=self.method,
            begun=None if self.directory is None else self.directory.engine,
        )

    def _run_rounds(self, result: Result, tracking: Tracking) -> None:
        federation = result.federation
        notified = set(federation.notices)
        metric = result.task.objective.metric

        def report(record: dict[str, Any], timing: dict[str, Any]) -> None:
            tracking.record(record, timing)
            for notice in timing.get("notices", ()):
                if notice not in notified:
                    self._notify(notice)
            number = record["round"]
            seconds = timing["seconds"]
            self._keep(result, number)
            self.watch(Event("round", self.name, number, record, seconds, "", timing, metric))
            if self.hook is not None:
                self.hook.report(record, timing)

        if self.trackers:
            method = folder_name(str(self.resolved["algorithm"]))
            folder = setting_folder(Path(), self.name.setting) / method
            label = (folder / f"seed-{self.name.seed}").as_posix()
            # The result reads them again only at the end.
            records = federation.history
            timings = federation.timings
            tracking.begin(self.configuration.name, label, self.resolved, records, timings)
        federation.run(report)

    def _keep(self, result: Result, number: int) -> None:
        """Save the global model of a round with a number that `keep_models` divides."""
        every = self.configuration.keep_models
        if every is None or self.directory is None or number % every:
            return
        write_kept(result, self.directory.path, number, self._model_text(result.task))

    def _model_text(self, task: Task) -> str:
        """Return the expression of the model, or the name of its class."""
        model = "" if self.configuration.objects else self.configuration.model
        return model or task.expression or type(task.model).__name__

    def _notify(self, notice: str) -> None:
        self.watch(Event("notice", self.name, text=notice))
