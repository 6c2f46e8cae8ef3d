"""One run: a method on a task with a seed, in Python (`run`) or from a configuration
(`run_configured`).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedloom.config.plugins import import_plugins
from fedloom.engines.base import Choice, LocalEngine
from fedloom.engines.choose import DEFAULT, make_engine, settled_by
from fedloom.engines.rows import RowsEngine
from fedloom.engines.work import step_threads, using_threads
from fedloom.errors import InvalidValue, quoted
from fedloom.method import Method
from fedloom.parts.building import build
from fedloom.recording.run_recording import Recording
from fedloom.report import summary as figures
from fedloom.report.card import model_card
from fedloom.report.curves import learning_curves
from fedloom.report.frames import data_frame, html_table, plain_records, result_lines
from fedloom.report.page import render, write_page
from fedloom.report.sheet import sheet
from fedloom.report.summary import RunSummary
from fedloom.rounds.engine import Engine
from fedloom.rounds.evaluation import Record
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import (
    RunDirectory,
    folder_name,
    locked,
    setting_folder,
    write_json,
)
from fedloom.runs.events import Event, RunName, Watch
from fedloom.runs.identity import environment, identity, task_digests
from fedloom.runs.progress import progress
from fedloom.runs.python_objects import PythonObjects
from fedloom.runs.settings import require_key
from fedloom.runs.trackers.tracker import Tracker
from fedloom.runs.trackers.tracking import Tracking
from fedloom.serving.artifact import save_model
from fedloom.state.files import remove_unfinished, write_text
from fedloom.state.store import BUDGET
from fedloom.state.tensors import write_tensors
from fedloom.task import Task

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go

_logger = logging.getLogger("fedloom")


@dataclass(frozen=True)
class Result:
    """A finished run. Its engine is closed, so it trains no more.

    Attributes:
        federation: The federation after its last round.
        task: The task that it was trained on.
        configuration: Everything that the figures depend on, as plain values.
        engine: The engine that trained, with the reason where a rule chose it.
        recording: The recorders, or None where nothing was recorded.
    """

    federation: Federation
    task: Task
    configuration: dict[str, Any]
    engine: Choice
    recording: Recording | None = None

    def __repr__(self) -> str:
        run, members = self.summary, ".model  .curves()  .plot()  .report('report.html')"
        title = f"{run.algorithm} on {self.task.dataset.name}, {self.task.clients} clients, seed {run.seed}"
        return "\n".join([title, *result_lines(run), f"engine: {self.engine}", members])

    def _repr_html_(self) -> str:
        return html_table(sheet([self.summary]).table, [f"engine: {self.engine}"])

    def curves(self) -> pandas.DataFrame:
        """Return a row for each round, with every figure that was recorded; NaN where none was.
        Needs pandas.
        """
        return data_frame(plain_records(self.summary))

    def plot(self, figure: str = "", x: str = "round") -> go.Figure:
        """Draw a figure of the records, such as `loss`, by default the metric, over `round`,
        `bytes` or `seconds`.
        """
        return learning_curves([self.summary], figure, x)

    @cached_property
    def model(self) -> nn.Module:
        """The global model, a module of its own in evaluation mode."""
        module = self.task.module(self.federation.model())
        self.task.layout.load_integers(module, self.federation.integers)
        return module.eval()

    @cached_property
    def history(self) -> list[Record]:
        """The figures of each round."""
        return self.federation.history

    @cached_property
    def timings(self) -> list[Record]:
        """The seconds of each round."""
        return self.federation.timings

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last round, a share in [0, 1].

        Raises:
            InvalidValue: The test set is empty, or the task has another metric.
        """
        return self._scores("accuracy")[-1]

    @property
    def best_accuracy(self) -> float:
        """Best test accuracy of any round; chosen on the test set, so it flatters. Raises as
        `accuracy`.
        """
        return max(self._scores("accuracy"))

    @property
    def score(self) -> float:
        """The task's metric on the test set after the last round; of a classification the accuracy.
        Raises as `accuracy`.
        """
        return self._scores(self.task.objective.metric.name)[-1]

    @property
    def best_score(self) -> float:
        """The best value of the metric in any round; chosen on the test set, so it flatters. Raises
        as `accuracy`.
        """
        metric = self.task.objective.metric
        return (max if metric.higher_is_better else min)(self._scores(metric.name))

    def _scores(self, name: str) -> list[float]:
        scores = [float(record[name]) for record in self.history if record.get(name) is not None]
        if not scores and len(self.task.test):
            raise InvalidValue(
                f"this task's models are judged by {self.task.objective.metric.name}: there is no {name}"
            )
        if not scores:
            raise InvalidValue(
                f"the test set of {self.task.dataset.name!r} is empty, so there is no test {name}"
            )
        return scores

    def rounds_to(self, target: figures.TargetValue) -> int | None:
        """Return the first round that reaches a target.

        Args:
            target: A value of the metric, such as an accuracy in (0, 1], or a limit of any figure,
                such as `loss <= 0.2`.

        Returns:
            The round's number, from 1, or None if no round reaches it.
        """
        return figures.rounds_to(self.summary, target)

    @cached_property
    def summary(self) -> RunSummary:
        """The figures as tables and reports take them."""
        about = _described_data(self.task)
        return RunSummary(
            str(self.configuration["algorithm"]),
            self.federation.schedule.seed,
            self.history,
            self.timings,
            about["label_counts"],
            about["class_names"],
            self.configuration,
            environment() | ({} if self.engine.named else {"engine": str(self.engine)}),
            self.recorded,
            self.federation.client_history,
            about["wrong_labels"],
            self.task.objective.metric,
        )

    @cached_property
    def recorded(self) -> list[dict[str, Any]]:
        """The recorders' results, one entry each."""
        return [] if self.recording is None else self.recording.results()

    @cached_property
    def ends(self) -> dict[str, Any]:
        metric = self.task.objective.metric
        return {
            "rounds": len(self.history),
            metric.name: figures.final(self.summary),
            f"best_{metric.name}": figures.best(self.summary),
            "bytes_down": figures.bytes_down(self.summary),
            "bytes_up": figures.bytes_up(self.summary),
            "seconds": figures.seconds(self.summary),
        }

    def report(self, path: str | Path) -> None:
        """Write a page of figures and tables that needs no other file.

        Args:
            path: The HTML file to write.
        """
        write_page(
            Path(path),
            render(f"{self.summary.algorithm}, seed {self.summary.seed}", [self.summary]),
        )


def run(
    algorithm: Method | str,
    task: Task,
    *,
    schedule: Schedule | None = None,
    directory: str | Path | None = None,
    record: Sequence[str] = (),
    engine: str = DEFAULT,
    trackers: Sequence[str | Tracker] = (),
    on_round: Callable[[Record, Record], None] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Result:
    """Train a method on a task.

    Args:
        algorithm: The method, such as `FedMR()` or `"fedmr(unit=segment, fraction=0.5)"`. It stays
            as it is.
        task: The data, how clients share them, the model and the settings of local training.
        schedule: How many rounds, with how many clients, and how often models are evaluated.
        directory: Folder for figures, checkpoints and the final model. The same call goes on where
            it was interrupted, and only reads the files of a finished run; with more `rounds` it
            lengthens the run, unless the method `needs_total_rounds`.
        record: Recorders, such as `["objective(every=10)"]` (see `Result.recorded`). They change
            nothing of the run.
        engine: Where clients train: `rows`, `stacked`, `processes`, `ray`, `default` or `auto`. By
            default a rule chooses, and a run that goes on keeps its engine.
        trackers: Trackers that hear of every round, such as `["tensorboard"]` (see
            `build_tracker`).
        on_round: Called after each round with its figures and its times.
        quiet: Show no progress on a terminal or in a notebook.
        **options: Fields of the `Schedule`, such as `rounds=50, participation=0.5, seed=0`; they
            replace those of `schedule`.

    Returns:
        The model, the figures of each round and what was recorded.

    Raises:
        InvalidValue: An argument is out of range, or the method does not fit the task.
        CheckpointError: The directory holds another run, or a damaged one.
        Diverged: No client's model is finite any more.
    """
    method = copy.deepcopy(build(algorithm))
    if not isinstance(task, Task):
        raise InvalidValue(f"task must be a Task, not {quoted(task)}: make one with fl.make_task")
    for key in options:
        require_key(key, [entry.name for entry in dataclasses.fields(Schedule)])
    schedule = dataclasses.replace(schedule or Schedule(), **options)
    name = RunName(str(method), schedule.seed)
    configuration = Configuration(
        **vars(schedule),
        name="fedloom",
        record=list(record),
        engine=engine,
        device=str(task.initial.device),
        objects=PythonObjects({name.algorithm: method}, task),
    )
    for recorder in configuration.recorders():
        if reason := recorder.inapplicable(method):
            raise InvalidValue(f"record: {recorder.name}: nothing to record for {method}: {reason}")
    run_directory = None if directory is None else RunDirectory(Path(directory))
    with (
        nullcontext() if run_directory is None else locked(run_directory.lock),
        progress(1, schedule.rounds, quiet, brief=True) as bars,
    ):
        begun = None if run_directory is None else run_directory.rounds

        def watch(event: Event) -> None:
            bars(event)
            if event.kind == "notice":
                _logger.warning(event.text)
            elif event.kind == "started":
                if begun not in (None, schedule.rounds):
                    _logger.warning(
                        "%s: going on from round %d of %d",
                        directory,
                        event.finished,
                        schedule.rounds,
                    )
                if event.text:
                    _logger.info("engine: %s", event.text)
            elif event.kind == "round" and on_round is not None:
                on_round(event.record, event.timing)

        return _RunPlan(configuration, name, watch, run_directory, trackers=trackers).carry_out()


def run_directory(
    configuration: Configuration, algorithm: str, seed: int, setting: str = ""
) -> RunDirectory:
    """Return the directory of a configured run: in the folder of its setting, where there are
    several, in its method's.
    """
    folder = setting_folder(configuration.folder, setting)
    name = algorithm if configuration.labelled(algorithm) else str(configuration.method(algorithm))
    return RunDirectory(folder / folder_name(name) / f"seed-{seed}")


def run_configured(
    configuration: Configuration,
    name: RunName,
    watch: Watch,
    *,
    fresh: bool = False,
    make_task: Callable[[int], Task] | None = None,
    path: Path | None = None,
    engine: Callable[[Task], Engine] | None = None,
    alone: bool = True,
) -> RunSummary:
    """Make one run, or go on with it, or read it when it is finished; return its figures. Raises as
    `run`.

    Whatever `watch` raises stops the run after the round. `alone` is False when other runs share
    the cores. Task, path and engine are those of the configuration unless they are given.
    """
    import_plugins(configuration.plugins)  # in worker processes too
    directory = run_directory(configuration, *name) if path is None else RunDirectory(path)
    with locked(directory.lock):
        remove_unfinished(directory.path)
        plan = _RunPlan(
            configuration,
            name,
            watch,
            directory,
            fresh,
            configuration.trackers,
            make_task,
            engine,
            alone,
        )
        if not fresh:
            if directory.finished:
                directory.require(plan.resolved, plan.method)
            if directory.ended(plan.resolved):
                summary = directory.summary(name.algorithm)
                watch(Event("skipped", name, configuration.rounds))
                return summary
        result = plan.carry_out()
        provenance = directory.provenance(None if result.engine.named else result.engine)
        versions = result.summary.environment | provenance
        summary = dataclasses.replace(
            result.summary, algorithm=name.algorithm, environment=versions
        )
    seconds = figures.seconds(summary) or 0.0
    last = summary.records[-1]
    watch(Event("ended", name, last["round"], last, seconds, metric=summary.metric))
    return summary


@dataclass
class _RunPlan:
    """A run that is about to begin. Task and engine are those of the configuration unless they are
    given.
    """

    configuration: Configuration
    name: RunName
    watch: Watch
    directory: RunDirectory | None
    fresh: bool = False
    trackers: Sequence[str | Tracker] = ()
    make_task: Callable[[int], Task] | None = None
    engine: Callable[[Task], Engine] | None = None
    alone: bool = True  # no other runs share the cores

    def __post_init__(self) -> None:
        configuration, (algorithm, seed, _) = self.configuration, self.name
        self.method, self.recorders = configuration.method(algorithm), configuration.recorders()
        self.schedule, self.resolved = (
            configuration.seeded(seed),
            configuration.resolved(algorithm, seed),
        )
        if self.directory is not None and not self.fresh:
            self.resolved = self.directory.with_engine(self.resolved)

    def carry_out(self) -> Result:
        """Run the remaining rounds, whose files are written to the directory."""
        configuration, directory, resolved = self.configuration, self.directory, self.resolved
        task = (self.make_task or configuration.task)(self.name.seed)
        path = None if directory is None else directory.path
        threads = configuration.threads or step_threads(task)
        # which the directory notes; engines that start processes see all there are
        with using_threads(threads):
            notices = (
                [] if directory is None else directory.begin(resolved, self.method, self.fresh)
            )
        over = directory is not None and directory.ended(resolved)
        recording = Recording(self.recorders, path) if self.recorders else None
        with (
            using_threads(configuration.threads),
            closing(RowsEngine(task) if over else self._engine(task)) as engine,
            using_threads(threads),
        ):
            digest = (
                "" if path is None else identity(task, resolved, self.method, configuration.clock)
            )
            observers = [] if recording is None else [recording]
            federation = Federation(
                self.method, task, engine, self.schedule, path, digest, observers
            )
            choice = engine.chosen if isinstance(engine, LocalEngine) else None
            choice = (directory.engine if directory and over else choice) or Choice(
                str(resolved["engine"])
            )
            if directory is not None and not over:
                directory.settle(resolved)
                _write_start(task, directory.path, choice)
            for notice in [
                *notices,
                *federation.notices,
                *(recording.notices if recording else []),
            ]:
                self._notify(notice)
            reason = "" if choice.named else str(choice)
            self.watch(Event("started", self.name, federation.finished, text=reason))
            result = Result(federation, task, resolved, choice, recording)
            with Tracking(() if over else self.trackers, path, self._notify) as tracking:
                self._run_rounds(result, tracking)
                if directory is not None and not over:
                    model = "" if configuration.objects else configuration.model
                    _write_end(
                        result, directory, model or task.expression or type(task.model).__name__
                    )
                if self.trackers and not over:
                    tracking.finish(result.ends)
            _ = result.summary  # reads all figures: their directory may be gone later
        return result

    def _engine(self, task: Task) -> Engine:
        """Make the engine: that of a run that goes on, and in this process if a recorder hooks into
        training.
        """
        if self.engine is not None:
            return self.engine(task)
        named = self.configuration.engine
        return make_engine(
            named if settled_by(named) == self.resolved["engine"] else str(self.resolved["engine"]),
            task,
            self.schedule,
            in_process=not self.alone
            or any(r.hooks_training and not r.inapplicable(self.method) for r in self.recorders),
            algorithm=self.method,
            begun=None if self.directory is None else self.directory.engine,
        )

    def _run_rounds(self, result: Result, tracking: Tracking) -> None:
        notified = set(result.federation.notices)
        metric = result.task.objective.metric

        def report(record: Record, timing: Record) -> None:
            tracking.record(record, timing)
            for notice in timing.get("notices", ()):
                if notice not in notified:
                    self._notify(notice)
            seconds = timing["seconds"]
            self.watch(
                Event(
                    "round",
                    self.name,
                    record["round"],
                    record,
                    seconds,
                    timing=timing,
                    metric=metric,
                )
            )

        if self.trackers:
            folder = setting_folder(Path(), self.name.setting) / folder_name(
                str(self.resolved["algorithm"])
            )
            label = (folder / f"seed-{self.name.seed}").as_posix()
            # a result reads them once
            records, timings = result.federation.history, result.federation.timings
            tracking.begin(self.configuration.name, label, self.resolved, records, timings)
        result.federation.run(report)

    def _notify(self, notice: str) -> None:
        self.watch(Event("notice", self.name, text=notice))


def _write_start(task: Task, path: Path, choice: Choice) -> None:
    if not choice.named:
        write_json(path / "engine.json", dataclasses.asdict(choice))
    if not task.elsewhere:
        task.partition.save(path / "split.npz")
        if task.local_test is not None:
            task.local_test.save(path / "test-split.npz")
    if task.true_labels is not None:
        write_tensors(
            path / "labels.safetensors", {"given": task.train.labels, "true": task.true_labels}, {}
        )
    write_json(path / "task.json", {**_described_data(task), "digests": task_digests(task)})


def _write_end(result: Result, directory: RunDirectory, model: str) -> None:
    """Write the recorders' results, the model, and at last the figures, whose file says that the
    run is finished.
    """
    task, summary = result.task, result.summary
    if result.recording is not None:
        result.recording.write(result.recorded)
    about = {"algorithm": summary.algorithm, "seed": str(summary.seed), "data": task.dataset.name}
    save_model(directory.path / "model.safetensors", result.model, model, task.dataset.spec, about)
    if personal := _personal_models(result.federation):
        write_tensors(directory.path / "personal.safetensors", personal, {})
    preprocessing = task.dataset.preprocessing
    write_text(directory.path / "preprocessing.json", preprocessing.to_json())
    write_text(
        directory.path / "model-card.md",
        model_card(summary, preprocessing, model, _described_data(task)),
    )
    directory.finish(result.ends)


def _personal_models(federation: Federation) -> dict[str, Tensor]:
    """Return the model `[P]` that each evaluated client would use, by its number, of personalised
    methods in a simulation.
    """
    task, engine, evaluation = federation.task, federation.engine, federation.evaluation
    size = task.initial.nbytes * (len(evaluation.clients) + len(evaluation.newcomers))
    measured = evaluation.personal_every and federation.pipeline.personal and size <= BUDGET
    if not measured or not isinstance(engine, LocalEngine):
        return {}
    rows = RowsEngine(task)
    rows.store = engine.store
    return {
        str(number): rows.personalised(federation.pipeline, upcoming, [job])[0][1].clone()
        for number, upcoming, job in federation.personal_tasks()
    }


def _described_data(task: Task) -> dict[str, Any]:
    names = task.dataset.class_names
    labels = task.train.labels.cpu().numpy()
    counts = task.partition.sizes[:0, None] if task.elsewhere else task.partition.sizes[:, None]
    if task.objective.classes and not task.elsewhere:
        counts = task.partition.histogram(labels, task.dataset.classes)
    index = torch.from_numpy(task.partition.indices).to(task.train.labels.device)
    wrong = None if task.true_labels is None else (task.train.labels != task.true_labels)[index]
    return {
        "label_counts": counts.tolist(),
        "wrong_labels": 0 if wrong is None else int(wrong.sum()),
        "class_names": None if names is None else list(names),
        "train_samples": int(task.partition.sizes.sum()),
        "test_samples": len(task.test),
        "parameters": task.layout.trainable,
        "metric": dataclasses.asdict(task.objective.metric),
    }
