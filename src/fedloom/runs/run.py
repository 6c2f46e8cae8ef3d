"""One run in Python: a method on a task with a seed."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fedloom.algorithm.method import Method
from fedloom.common.errors import InvalidValue, quoted
from fedloom.rounds.schedule import Schedule
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import (
    RunDirectory,
    locked,
)
from fedloom.runs.entry import Chosen, Entry, entry_of
from fedloom.runs.events import Event, RunName
from fedloom.runs.finished_round import FinishedRound, RoundHook
from fedloom.runs.progress import progress
from fedloom.runs.python_objects import PythonObjects
from fedloom.runs.result import Result
from fedloom.runs.run_plan import RunPlan
from fedloom.runs.settings import require_key
from fedloom.runs.trackers.tracker import Tracker
from fedloom.task import Task

_logger = logging.getLogger("fedloom")


def run(
    algorithm: Method | str | Entry | Chosen,
    task: Task,
    *,
    schedule: Schedule | None = None,
    directory: str | Path | None = None,
    record: Sequence[str] = (),
    engine: str = "default",
    trackers: Sequence[str | Tracker] = (),
    on_round: Callable[[FinishedRound], None] | None = None,
    keep_models: int | None = None,
    quiet: bool = False,
    fresh: bool = False,
    **options: Any,
) -> Result:
    """Train a method on a task.

    Args:
        algorithm: The method, such as `FedMR()` or `"fedmr(unit=segment, fraction=0.5)"`, which is
            copied; an `Entry` or the result of `fl.tune`, which has settings of the training and
            the schedule too.
        task: The data, how clients share them, the model and the settings of local training.
        schedule: How many rounds, with how many clients, and how often models are evaluated.
        directory: Folder for figures, checkpoints and the final model. The same call continues an
            interrupted run, and only reads the files of a finished run; with more `rounds` it
            lengthens the run, unless the method `needs_total_rounds`.
        record: Recorders, such as `["objective(every=10)"]` (see `Result.recorded`). They change
            nothing of the run.
        engine: Where clients train: `rows`, `stacked`, `processes`, `ray`, `default` or `auto`. By
            default a rule chooses, and a resumed run keeps its engine.
        trackers: Trackers that record every round, such as `["tensorboard"]` (see `build_tracker`).
        on_round: Called after each round with the round: its `number`, `figures` and `times`, the
            global `model`, and the `client_model(3)` that client 3 sent.
        keep_models: Save every k-th global model in the directory, for `fl.load(directory,
            round=10)`.
        quiet: Show no progress on a terminal or in a notebook.
        fresh: Start again in the directory.
        **options: Fields of the `Schedule`, such as `rounds=50, participation=0.5, seed=0`; they
            replace those of `schedule`.

    Returns:
        The model, the figures of each round and the recordings.

    Raises:
        InvalidValue: An argument is out of range, or the method does not fit the task.
        CheckpointError: The directory holds another run, or a damaged one.
        Diverged: No client's model is finite any more.
    """
    entry = entry_of(algorithm)
    method = copy.deepcopy(entry.algorithm)
    if not isinstance(task, Task):
        raise InvalidValue(f"task must be a Task, not {quoted(task)}: make one with fl.make_task")
    for key in options:
        require_key(key, [entry.name for entry in dataclasses.fields(Schedule)])
    task = entry.task(task)
    schedule = dataclasses.replace(schedule or Schedule(), **options)
    schedule = entry.schedule(schedule, options)
    name = RunName(str(method), schedule.seed)
    configuration = Configuration(
        **vars(schedule),
        name="fedloom",
        record=list(record),
        keep_models=keep_models,
        engine=engine,
        device=str(task.initial.device),
        objects=PythonObjects({name.algorithm: method}, task),
    )
    for recorder in configuration.recorders():
        if reason := recorder.inapplicable(method):
            raise InvalidValue(f"record: {recorder.name}: nothing to record for {method}: {reason}")
    if keep_models is not None and directory is None:
        raise InvalidValue("keep_models saves models in a folder: set directory")
    run_directory = None if directory is None else RunDirectory(Path(directory))
    with (
        nullcontext() if run_directory is None else locked(run_directory.lock),
        progress(1, schedule.rounds, quiet, brief=True) as bars,
    ):
        finished = (
            run_directory is not None
            and run_directory.finished
            and run_directory.rounds == schedule.rounds
        )

        def watch(event: Event) -> None:
            bars(event)
            if event.kind == "notice":
                _logger.warning(event.text)
            elif event.kind == "started":
                if event.finished and not finished:
                    _logger.warning(
                        "%s: going on from round %d of %d",
                        directory,
                        event.finished,
                        schedule.rounds,
                    )
                if event.text:
                    _logger.info("engine: %s", event.text)

        plan = RunPlan(configuration, name, watch, run_directory, fresh, trackers)
        if on_round is not None:
            trainers = task.clients - schedule.newcomers(task.clients)
            plan.hook = RoundHook(on_round, task, schedule.participants(trainers))
        return plan.execute()
