"""One run: a method on a task with a seed, in Python (`run`) or from a configuration (`run_configured`)."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from fedloom.algorithm import Algorithm, build, describe
from fedloom.config.plugins import import_plugins
from fedloom.engines.base import Choice, LocalEngine
from fedloom.engines.choose import DEFAULT, make_engine, settled_by
from fedloom.engines.rows import RowsEngine
from fedloom.engines.work import step_threads, using_threads
from fedloom.errors import InvalidValue
from fedloom.experiment.artifact import save_model
from fedloom.experiment.configuration import Configuration, schedule_values
from fedloom.experiment.directory import RunDirectory, folder_name, locked, trained_in, write_json
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.identity import environment, identity
from fedloom.experiment.trackers.tracker import Tracker
from fedloom.experiment.trackers.tracking import Tracking
from fedloom.recording.recorder import Recorder, build_recorders, expression
from fedloom.recording.run_recording import Recording
from fedloom.report import summary as figures
from fedloom.report.page import write_report
from fedloom.report.summary import RunSummary
from fedloom.rounds.clock import Clock
from fedloom.rounds.engine import Engine
from fedloom.rounds.evaluation import Record
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.state.files import remove_unfinished
from fedloom.state.tensors import write_tensors
from fedloom.task import Task

OnRound = Callable[[Record, Record], None]
"""Called after each round with its figures and its times."""

_logger = logging.getLogger("fedloom")


@dataclass(frozen=True)
class Result:
    """A run that came to its end; its federation's engine is closed, so it trains no more."""

    federation: Federation
    task: Task
    configuration: dict[str, Any]
    recording: Recording | None = None
    engine: Choice | None = None

    @cached_property
    def model(self) -> nn.Module:
        """The global model, a module of its own in evaluation mode."""
        task = self.task
        module = task.module(self.federation.algorithm.model())
        task.layout.load_integers(module, self.federation.integers)
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
        """Test accuracy after the last round, a share in [0, 1]. Raises `InvalidValue` where the test set is empty."""
        return self._judged("accuracy")[-1]

    @property
    def best_accuracy(self) -> float:
        """Best test accuracy of any round (chosen on the test set, so it flatters). Raises as `accuracy`."""
        return max(self._judged("accuracy"))

    @property
    def score(self) -> float:
        """The task's metric on the test set after the last round; of a classification the accuracy. Raises as `accuracy`."""
        return self._judged(self.task.objective.metric.name)[-1]

    @property
    def best_score(self) -> float:
        """The best value of the metric in any round (chosen on the test set, so it flatters). Raises as `accuracy`."""
        metric = self.task.objective.metric
        best = metric.best(self._judged(metric.name))
        assert best is not None  # else `_judged` raises
        return best

    def _judged(self, name: str) -> list[float]:
        found = figures.values(self.history, name)
        if not found and len(self.task.test):
            raise InvalidValue(
                f"models of this task are judged by {self.task.objective.metric.name}: there is no {name}"
            )
        if not found:
            raise InvalidValue(f"the test set of {self.task.dataset.name!r} is empty, so there is no test {name}")
        return found

    def rounds_to(self, target: figures.TargetValue) -> int | None:
        """First round whose test accuracy (a share in (0, 1]), or whatever the metric is, is as good, or that keeps a limit such
        as `loss <= 0.2`; None if never."""
        return figures.rounds_to(self.summary, target)

    @cached_property
    def summary(self) -> RunSummary:
        """What tables and reports take."""
        about = _described_data(self.task)
        return RunSummary(
            str(self.configuration["algorithm"]),
            self.federation.schedule.seed,
            self.history,
            self.timings,
            about["label_counts"],
            about["class_names"],
            self.configuration,
            environment() | trained_in(self.engine),
            self.recorded,
            self.federation.client_history,
            about["wrong_labels"],
            self.task.objective.metric,
        )

    @cached_property
    def recorded(self) -> list[dict[str, Any]]:
        """What was recorded on request, one entry a recorder."""
        return [] if self.recording is None else self.recording.results()

    @cached_property
    def ends(self) -> dict[str, Any]:
        """The figures at the end."""
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
        """Write a page of figures and tables that needs no other file."""
        write_report(Path(path), f"{self.summary.algorithm}, seed {self.summary.seed}", [self.summary])


def run(
    algorithm: Algorithm | str,
    task: Task,
    *,
    rounds: int = 100,
    participation: float = 0.1,
    participation_mode: Literal["fixed", "poisson"] = "fixed",
    seed: int = 0,
    directory: str | Path | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int = 10,
    dropout: float = 0.0,
    personal_every: int | None = None,
    personal_clients: int = 1000,
    new_clients: float = 0.0,
    pool_budget: int | str | None = None,
    clock: Clock | None = None,
    record: Sequence[str] = (),
    engine: str = DEFAULT,
    trackers: Sequence[str | Tracker] = (),
    on_round: OnRound | None = None,
) -> Result:
    """Train `algorithm`, such as `FedMR()` or `"fedmr(unit=segment, fraction=0.5)"`, on the task.

    How long and how often is told as to `Schedule`. With a `directory`, figures, checkpoints and the final model are kept
    there: the same call goes on where it was interrupted, and only reads what is there when the run is finished; with more
    `rounds` it lengthens the run, unless the method `needs_total_rounds`. `algorithm` stays as it is. `record` says what is
    written down beside the figures, such as `["objective(every=10)"]` (`Result.recorded`); the run is the same without.
    `engine` is where clients train: `rows`, `stacked`, `processes`, `ray`, `default` or `auto` (`make_engine`); by default a rule
    chooses, and a run that goes on keeps its engine.
    `trackers` hear of every round (`build_tracker`).
    Raises `InvalidValue` for a figure out of range, `CheckpointError` for the directory of another run, and `Diverged` when
    no client's model is finite any more.
    """
    method = copy.deepcopy(build(algorithm))
    schedule = Schedule(
        rounds, participation, seed, evaluate_every, checkpoint_every, dropout, personal_every, personal_clients, new_clients,
        participation_mode, cast("int | None", pool_budget), clock or Clock(),
    )  # fmt: skip
    recorders = build_recorders(record)
    for recorder in recorders:
        if reason := recorder.inapplicable(method):
            raise InvalidValue(f"record: {recorder.name}: nothing to record for {describe(method)}: {reason}")
    described = {
        "algorithm": describe(method),
        **schedule_values(schedule),
        "model": type(task.model).__name__,
        "data": {"name": task.dataset.name, "clients": task.clients},
        "training": dataclasses.asdict(task.training),
        "record": [expression(recorder) for recorder in recorders],
        "engine": settled_by(engine),
        "device": str(task.initial.device),
    }
    place = None if directory is None else RunDirectory(Path(directory))
    with nullcontext() if place is None else locked(place.lock):
        before = None if place is None else place.rounds
        described = described if place is None else place.kept(described)

        def watch(event: Event) -> None:
            if event.kind == "notice":
                _logger.warning(event.text)
            elif event.kind == "started":
                if before not in (None, rounds):
                    _logger.warning("%s: going on from round %d of %d", directory, event.finished, rounds)
                if event.text:
                    _logger.info("engine: %s", event.text)
            elif event.kind == "round" and on_round is not None:
                on_round(event.record, event.timing)

        return _RunPlan(
            method,
            task,
            schedule,
            described,
            recorders,
            RunName(described["algorithm"], seed),
            watch,
            trackers,
            _engine_text(engine, described),
        ).carry_out(place)


def _engine_text(engine: str, described: dict[str, Any]) -> str:
    """The engine as it was named, with its options, or the one that a run which goes on keeps."""
    return engine if settled_by(engine) == described["engine"] else str(described["engine"])


def run_directory(configuration: Configuration, algorithm: str, seed: int, setting: str = "") -> RunDirectory:
    """Where a configured run lies: in the folder of its setting, where there are several, in that of its method."""
    folder = configuration.folder / folder_name(setting) if setting else configuration.folder
    return RunDirectory(folder / folder_name(describe(build(algorithm))) / f"seed-{seed}")


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
    """Run one method with one seed in its directory, or go on with it, or, when it is finished, only read its figures.

    `configuration` is that of the run's own setting. `fresh` starts again whatever is there. `watch` hears of every round;
    what it raises stops the run after that round. `make_task` gives the task of a seed where the caller keeps tasks, `path`
    is the directory where it is not the usual one, `engine` makes the engine where it is not the configuration's. A run that
    is not `alone` shares the cores with others. Raises as `run` does.
    """
    import_plugins(configuration.plugins)  # in worker processes too
    resolved = configuration.resolved(name.algorithm, name.seed)
    place = run_directory(configuration, *name) if path is None else RunDirectory(path)
    with locked(place.lock):
        remove_unfinished(place.path)
        method = build(name.algorithm)
        if not fresh:
            resolved = place.kept(resolved)
        if not fresh and place.finished:
            place.require(resolved, method)
        if not fresh and place.ended(resolved):
            found = place.summary(name.algorithm)
            watch(Event("skipped", name, configuration.rounds))
            return found
        task = (make_task or configuration.task)(name.seed)
        schedule = dataclasses.replace(configuration.schedule, seed=name.seed)
        plan = _RunPlan(
            method,
            task,
            schedule,
            resolved,
            build_recorders(configuration.record),
            name,
            watch,
            configuration.trackers,
            engine or _engine_text(configuration.engine, resolved),
            alone,
            configuration.threads,
            experiment=configuration.name,
            model=configuration.model,
        )
        with using_threads(configuration.threads):
            result = plan.carry_out(place, fresh)
        found = place.summary(name.algorithm)
    last, seconds, metric = result.history[-1], figures.seconds(found) or 0.0, found.metric
    watch(Event("ended", name, configuration.rounds, last, seconds, metric=metric))
    return found


@dataclass(frozen=True)
class _RunPlan:
    """A run that is about to begin: what trains on what, who hears of it, and how it is called."""

    method: Algorithm
    task: Task
    schedule: Schedule
    described: dict[str, Any]  # everything that the figures depend on, as plain values
    recorders: list[Recorder]
    name: RunName
    watch: Watch
    trackers: Sequence[str | Tracker]
    engine: str | Callable[[Task], Engine]
    alone: bool = True  # no other runs share the cores
    threads: int | None = None
    experiment: str = "fedloom"
    model: str = ""  # the expression that builds it again; by default the name of its class

    def carry_out(self, place: RunDirectory | None, fresh: bool = False) -> Result:
        """The result after the remaining rounds, kept in `place` where there is one."""
        threads = self.threads or step_threads(self.task)
        with using_threads(threads):  # which the directory notes; engines that start processes see all there are
            notices = [] if place is None else place.begin(self.described, self.method, fresh)
        over = place is not None and place.ended(self.described)
        path = None if place is None else place.path
        recording = Recording(self.recorders, path) if self.recorders else None
        hooked = any(one.hooks_training and not one.inapplicable(self.method) for one in self.recorders)
        with (
            closing(RowsEngine(self.task) if over else self._engine(hooked, place)) as engine,
            using_threads(threads),
        ):
            federation = self._federation(engine, recording, place)
            chosen = place.engine if place and over else engine.chosen if isinstance(engine, LocalEngine) else None
            if chosen is not None and chosen.named:
                chosen = None
            if chosen is not None and path is not None:
                write_json(path / "engine.json", dataclasses.asdict(chosen))
            for notice in [*notices, *federation.notices, *(recording.notices if recording else [])]:
                self._say(notice)
            self.watch(Event("started", self.name, federation.finished, text=str(chosen or "")))
            result = Result(federation, self.task, self.described, recording, chosen)
            with Tracking(() if over else self.trackers, path, self._say) as tracking:
                self._track(result, tracking)
                if place is not None and not over:
                    _write(result, place, self.model or type(self.task.model).__name__)
                if self.trackers and not over:
                    tracking.finish(result.ends)
            _ = result.summary  # which reads all figures: their directory may be gone when somebody asks
        return result

    def _engine(self, in_process: bool, place: RunDirectory | None) -> Engine:
        """Where clients train: in this process for a recorder to hook their training."""
        if not isinstance(self.engine, str):
            return self.engine(self.task)
        begun = None if place is None else place.engine
        return make_engine(
            self.engine, self.task, self.schedule,
            in_process=in_process, alone=self.alone, algorithm=self.method, begun=begun,
        )  # fmt: skip

    def _federation(self, engine: Engine, recording: Recording | None, place: RunDirectory | None) -> Federation:
        """The federation, after its last checkpoint where it has a directory; what is needed to read that is written first."""
        task, observers = self.task, [] if recording is None else [recording]
        if place is None:
            return Federation(self.method, task, engine, self.schedule, observers=observers)
        run = identity(task, self.described, self.method, self.schedule.clock)
        federation = Federation(self.method, task, engine, self.schedule, place.path, run, observers)
        place.settle(self.described)
        if not task.elsewhere:
            task.partition.save(place.path / "split.npz")
            if task.local_test is not None:
                task.local_test.save(place.path / "test-split.npz")
        if task.true_labels is not None:
            write_tensors(place.path / "labels.safetensors", {"given": task.train.labels, "true": task.true_labels}, {})
        write_json(place.path / "task.json", _described_data(task))
        return federation

    def _track(self, result: Result, tracking: Tracking) -> None:
        """Run the remaining rounds; trackers hear of each before anybody else does."""

        said = set(result.federation.notices)

        def told(record: Record, timing: Record) -> None:
            tracking.record(record, timing)
            for notice in timing.get("notices", ()):
                if notice not in said:
                    self._say(notice)
            metric = result.task.objective.metric
            self.watch(
                Event("round", self.name, record["round"], record, timing["seconds"], timing=timing, metric=metric)
            )

        label = f"{folder_name(str(self.described['algorithm']))}/seed-{self.schedule.seed}"
        label = f"{folder_name(self.name.setting)}/{label}" if self.name.setting else label
        run = result.federation
        tracking.begin(self.experiment, label, self.described, run.history, run.timings)
        run.run(told)

    def _say(self, notice: str) -> None:
        self.watch(Event("notice", self.name, text=notice))


def _write(result: Result, place: RunDirectory, model: str) -> None:
    """Write what was recorded, the model, and at last the figures, whose file says that the run is finished."""
    task, summary = result.task, result.summary
    if result.recording is not None:
        result.recording.write(result.recorded)
    about = {"algorithm": summary.algorithm, "seed": str(summary.seed), "data": task.dataset.name}
    save_model(place.path / "model.safetensors", result.model, model, task.dataset.spec, about)
    place.finish(result.ends)


def _described_data(task: Task) -> dict[str, Any]:
    """What reports say of the clients' data."""
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
