"""A search carried out, for the command and for Python, and its result."""

from __future__ import annotations

import shlex
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from fedloom.config.fields import require_at_least
from fedloom.errors import InvalidValue, quoted
from fedloom.method import Method
from fedloom.report.cells import Cell, Column, Table, score_cell
from fedloom.report.page import ReportOptions
from fedloom.runs.events import Watch
from fedloom.runs.progress import progress
from fedloom.runs.python_objects import PythonObjects, TaskOf
from fedloom.runs.settings import label, plain_text
from fedloom.study.comparison import labelled, python_table
from fedloom.study.comparison_result import ComparisonResult
from fedloom.study.cores import runs_side_by_side
from fedloom.study.jobs import Tasks, require_possible
from fedloom.study.pools import make_pool
from fedloom.study.suggest import TRIALS, search_optuna
from fedloom.study.tune import (
    Search,
    Trial,
    best_of,
    final_trial,
    jobs_of,
    run_trials,
    write_trials,
)

Show = Callable[[int], AbstractContextManager[tuple[Watch, Callable[[], bool]]]]
"""Shows the progress of so many runs, and says whether they should stop."""

_SHOWN = 20  # trials in a terminal or a notebook


@dataclass(frozen=True, repr=False)
class TuneResult(ComparisonResult):
    """The trials of a search, each a method of `frame`, `curves`, `plot` and `differences`; figures
    are of validation data.

    Attributes:
        trials: All trials, with the measure of each by seed.
        tested: The best choice trained on all training data and scored on the test data, where that
            was asked for.
    """

    trials: Sequence[Trial] = ()
    tested: Trial | None = None

    @property
    def best(self) -> Trial:
        """The trial with the best mean over the seeds; its `changes` are the values."""
        return best_of(self.trials)

    @property
    def method(self) -> Method:
        """The method with the best parameters."""
        return self.best.configuration.method(self.best.algorithm)

    @property
    def shown(self) -> Table:
        """The best trials with their values, the best first."""
        ranked = sorted(
            self.trials,
            key=lambda trial: (trial.score is None, -(trial.score or 0.0), trial.number),
        )
        lines = []
        for trial in ranked[:_SHOWN]:
            texts = [str(trial.number), *map(plain_text, trial.changes.values())]
            lines.append(
                (*(Cell(text, text) for text in texts), score_cell(trial.spread, trial.metric))
            )
        best = "largest" if self.best.metric.higher_is_better else "smallest"
        return Table(
            (*map(Column, ["Trial", *self.best.changes]), Column("Validation", best)), tuple(lines)
        )

    @property
    def notes(self) -> list[str]:
        """The measure, the failures, the files, the best choice and its test."""
        best, tested, count = self.best, self.tested, len(self.trials)
        measure = f"{best.measure} on validation data{', %' if best.metric.share else ''}"
        command = f"fedloom run {shlex.quote(str(self.folder / 'best.toml'))}"
        notes = [
            f"{_SHOWN} best of {count} trials; {measure}" if count > _SHOWN else measure,
            *(
                f"trial {trial.number}: {trial.reason}"
                for trial in self.trials
                if trial.spread is None
            ),
            f"trials: {self.folder / 'trials.csv'}",
            f"best:   {label(best.changes) if best.configuration.objects else command}",
        ]
        if tested is not None:
            score = score_cell(tested.spread, tested.metric).text + tested.metric.unit
            seeds = f" over {len(tested.values)} seeds" if len(tested.values) > 1 else ""
            figure = f"{score}{seeds}" if tested.spread else tested.reason
            notes.append(f"test:   {figure}, {tested.measure}, trained on all training data")
        return notes


def tune(
    method: Method | str,
    task: TaskOf,
    search: Mapping[str, Any],
    *,
    seeds: Iterable[int] = (0,),
    directory: str | Path | None = None,
    trials: int | None = None,
    optuna: bool = False,
    test: bool = False,
    quiet: bool = False,
    **options: Any,
) -> TuneResult:
    """Search a method's parameters on validation data alone, as `fedloom tune` does: a few runs at
    a time, and resumed.

    Args:
        method: The method: an object, or text such as `"ala(fedprox)"`.
        task: The task, or a function from a seed to the task. A fifth of each client's training
            samples is held out to judge by.
        search: Values by key, as a list or a range: `{"mu": [0.01, 0.1], "training.learning_rate":
            {"from": 0.01, "to": 1, "steps": 3, "scale": "log"}}`. A key is a parameter of the
            method, a field of the `Schedule`, or `training.` and a field of the `Training`.
        seeds: The seeds of each trial.
        directory: Folder of the runs; the same call goes on where it was interrupted. By default a
            folder that is removed with the result.
        trials: The number of trials; of a grid, drawn at random.
        optuna: Let Optuna suggest the trials, 20 by default; ranges then need no `steps`.
        test: Train the best choice on all training data and score it on the test data, which can be
            done once.
        quiet: Show no progress.
        **options: As for `fl.compare`.

    Returns:
        The trials as tables, frames and figures, and the best.

    Raises:
        InvalidValue: A key or a value is not allowed, or no trial came to its end.
    """
    if not isinstance(search, Mapping):
        raise InvalidValue(
            f"search must be a dictionary such as {{'mu': [0.01, 0.1]}}, not {quoted(search)}"
        )
    objects = PythonObjects(labelled([method]), task)
    table = python_table(objects, seeds, directory, options)
    space = Search(table, search, steps_needed=not optuna, objects=objects)

    @contextmanager
    def show(runs: int) -> Iterator[tuple[Watch, Callable[[], bool]]]:
        with progress(runs, space.configuration.rounds, quiet) as watch:
            yield watch, lambda: False

    result = carry_out(space, show, trials, optuna, test)
    if directory is None:
        weakref.finalize(result, rmtree, table["directory"], ignore_errors=True)
    return result


def carry_out(
    search: Search, show: Show, trials: int | None, optuna: bool, test: bool
) -> TuneResult:
    """Make the trials of a search, or go on with them, and write them. Raises as `fl.tune`."""
    if trials is not None:
        require_at_least("trials", trials, 1)
    plan, tasks = search.configuration, Tasks()
    completed = [] if optuna else search.grid(trials)
    count = (trials or TRIALS) if optuna else len(completed)
    runs = count * len(plan.seeds or [plan.seed])
    # Optuna waits for the trials under way
    workers = plan.runs_at_a_time if optuna else runs_side_by_side(plan, runs)
    with closing(
        make_pool(replace(plan, workers=workers), workers if optuna else runs, runs, tasks)
    ) as pool:
        with show(runs) as (watch, stopped):
            if optuna:
                completed = search_optuna(
                    search, lambda batch: run_trials(batch, pool, watch, stopped), count, workers
                )
            else:
                require_possible(
                    [job for job in jobs_of(completed).values() if not job.finished], tasks
                )
                run_trials(completed, pool, watch, stopped)
        best, tested = best_of(completed), None
        write_trials(search, completed)
        if test:
            with show(len(best.seeds)) as (watch, stopped):
                tested = final_trial(search, best)
                run_trials([tested], pool, watch, stopped)
    # trials that are alike share runs
    runs_by_path = {run.path: run for trial in completed for run in trial.runs}
    options = ReportOptions(f"{plan.name}, tuned", (), "", plan.last, plan.against, plan.measure)
    return TuneResult(
        search.folder, [*runs_by_path.values()], options, trials=completed, tested=tested
    )
