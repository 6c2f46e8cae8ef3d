"""Tune a method, for the command and for Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedloom.algorithm.method import Method
from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.fields import require_at_least
from fedloom.report.sheet import ReportOptions
from fedloom.runs.entry import Entry
from fedloom.runs.progress import Show, bars
from fedloom.runs.python_objects import TaskOf
from fedloom.study.cores import runs_side_by_side
from fedloom.study.jobs import Tasks, require_possible
from fedloom.study.pools import make_pool
from fedloom.study.python_runs import in_temporary_folder, labelled, objects_of, python_table
from fedloom.study.search import Search, Trial, best_of
from fedloom.study.suggest import TRIALS, search_optuna
from fedloom.study.trials import final_trial, jobs_of, run_trials, write_trials
from fedloom.study.tune_result import TuneResult


@in_temporary_folder
def tune(
    method: Method | str | Entry,
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
    """Search a method's parameters on validation data only, as `fedloom tune` does: a few runs at
    a time, and resumed.

    Args:
        method: The method: an object, text such as `"ala(fedprox)"`, or an `Entry`.
        task: The task, or a function from a seed to the task. A fifth of each client's training
            samples is held out to judge by.
        search: Values by key, as a list or a range: `{"mu": [0.01, 0.1], "training.learning_rate":
            {"from": 0.01, "to": 1, "steps": 3, "scale": "log"}}`. A key is a parameter of the
            method, a field of the `Schedule`, or `training.` and a field of the `Training`.
        seeds: The seeds of each trial.
        directory: Folder of the runs; the same call continues an interrupted search. By default a
            folder that is removed with the result.
        trials: The number of trials; of a grid, drawn at random.
        optuna: Let Optuna suggest the trials, 20 by default; ranges then need no `steps`.
        test: Train the best choice on all training data and score it on the test data, which can be
            done once.
        quiet: Show no progress.
        **options: As for `fl.compare`.

    Returns:
        The trials as tables, frames and figures, and the best: `tuned.run(task)` trains with its
        settings, and `fl.compare({"FedProx": tuned, ...}, task)` compares it.

    Raises:
        InvalidValue: A key or a value is not allowed, or no trial came to its end.
    """
    if not isinstance(search, Mapping):
        raise InvalidValue(
            f"search must be a dictionary such as {{'mu': [0.01, 0.1]}}, not {quoted(search)}"
        )
    entries = labelled([method])
    objects = objects_of(entries, task)
    table = python_table(objects, seeds, directory, options)
    (entry,) = entries.values()
    space = Search(table, search, steps_needed=not optuna, objects=objects, own=entry.settings)
    show = bars(space.configuration.rounds, quiet)
    return run_search(space, show, trials, optuna, test)


def run_search(
    search: Search, show: Show, trials: int | None, optuna: bool, test: bool
) -> TuneResult:
    """Make the trials of a search that are not finished, and write all. Raises as `fl.tune`.

    Args:
        search: The space.
        show: Shows the progress of runs.
        trials: Number of trials; None for all of a grid.
        optuna: Let Optuna suggest the trials.
        test: Score the best choice on the test data.

    Returns:
        The trials, and the best.
    """
    if trials is not None:
        require_at_least("trials", trials, 1)
    plan, tasks = search.configuration, Tasks()
    completed = [] if optuna else search.grid(trials)
    count = (trials or TRIALS) if optuna else len(completed)
    runs = at_a_time = count * len(plan.seeds or [plan.seed])
    if optuna:  # it waits for the trials in progress
        workers = at_a_time = plan.runs_at_a_time
    else:
        workers = runs_side_by_side(plan, runs)
    tested = None
    with closing(make_pool(replace(plan, workers=workers), at_a_time, runs, tasks)) as pool:
        with show(runs) as (watch, stopped):
            if optuna:

                def run_batch(batch: list[Trial]) -> None:
                    run_trials(batch, pool, watch, stopped)

                completed = search_optuna(search, run_batch, count, workers)
            else:
                jobs = jobs_of(completed).values()
                require_possible([job for job in jobs if not job.finished], tasks)
                run_trials(completed, pool, watch, stopped)
        best = best_of(completed)
        write_trials(search, completed)
        if test:
            with show(len(best.seeds)) as (watch, stopped):
                tested = final_trial(search, best)
                run_trials([tested], pool, watch, stopped)
    # equal trials share runs
    unique = {run.path: run for trial in completed for run in trial.runs}
    options = ReportOptions(f"{plan.name}, tuned", (), "", plan.last, plan.against, plan.measure)
    return TuneResult(
        search.folder,
        list(unique.values()),
        options,
        trials=completed,
        tested=tested,
        own=search.settings_of(best),
    )
