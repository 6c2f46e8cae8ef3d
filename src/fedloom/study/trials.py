"""Make the trials of a search and write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import tomli_w

from fedloom.common.errors import InvalidValue
from fedloom.report.export import csv_text
from fedloom.report.summary import measured
from fedloom.runs.directory import finished_runs, read_json, write_json
from fedloom.runs.events import RunName, Watch
from fedloom.runs.settings import (
    label,
    plain_text,
)
from fedloom.state.files import write_text
from fedloom.study.jobs import RunJob, job_of, unfinished
from fedloom.study.pools import RunPool
from fedloom.study.search import Search, Trial, best_of
from fedloom.study.stored_runs import StoredRun


def jobs_of(trials: Sequence[Trial]) -> dict[RunName, RunJob]:
    """Return the runs of all seeds of the trials; equal trials share runs."""
    finished = finished_runs(trials[0].configuration.folder)
    names = {trial.name(seed): trial.configuration for trial in trials for seed in trial.seeds}
    return {name: job_of(configuration, name, finished) for name, configuration in names.items()}


def run_trials(
    trials: Sequence[Trial], pool: RunPool, watch: Watch, stopped: Callable[[], bool]
) -> None:
    """Make the unfinished runs and set the measure of every trial.

    Args:
        trials: The trials, at least one. Their values, reasons and runs are set.
        pool: The pool that makes the runs.
        watch: Called with every event.
        stopped: As in `SerialPool.run`.
    """
    jobs = jobs_of(trials)
    failed = pool.run(unfinished(jobs.values(), watch), watch, False, stopped)
    for trial in trials:
        for seed in trial.seeds:
            name, value = trial.name(seed), None
            if name not in failed:
                summary = jobs[name].summary()
                trial.metric = summary.metric
                value = measured(summary, trial.configuration.measure, trial.configuration.last)
                named = replace(summary, algorithm=label(trial.changes))
                trial.runs.append(StoredRun("", jobs[name].path, named, trial.changes))
            if value is None:
                trial.reason = failed.get(name, "nothing was measured")
            else:
                trial.values[seed] = value


def write_trials(search: Search, trials: Sequence[Trial]) -> None:
    """Write every trial to `trials.csv`, and the configuration of the best to `best.toml`.

    A search with Python objects has no `best.toml`.

    Args:
        search: The search, with its folder.
        trials: Finished trials; `spread` is in the units of the measure.
    """
    lines = [
        {
            "trial": trial.number,
            **{key: plain_text(trial.changes[key]) for key in search.axes},
            "method": trial.algorithm,
            "validation": trial.spread and trial.spread.mean,
            "validation_std": trial.spread and trial.spread.std,
            "seeds": len(trial.values),
            "reason": trial.reason,
        }
        for trial in trials
    ]
    write_text(search.folder / "trials.csv", csv_text(lines, ["trial"]))
    if search.objects is None:
        table = search.chosen(best_of(trials).changes)
        table["name"] = f"{search.configuration.name}-best"
        write_text(search.folder / "best.toml", tomli_w.dumps(table))


def final_trial(search: Search, best: Trial) -> Trial:
    """Return the only trial that trains on all training data and is judged on the test data.

    Args:
        search: The search.
        best: The trial to judge.

    Returns:
        The trial before its runs. Its choice is written to `tested.json`.

    Raises:
        InvalidValue: The test data of this search were used for another choice.
    """
    path = search.folder / "tested.json"
    choice = {key: plain_text(value) for key, value in best.changes.items()}
    if path.exists() and (tested := read_json(path, dict, f"remove {path}")) != choice:
        raise InvalidValue(
            f"the test data of this search were used once, for {label(tested)}: a second choice "
            f"tested on them is no test any more (remove {path} to do it all the same)"
        )
    settings = {"data.validation": "none", "directory": str(search.folder / "test")}
    if search.configuration.measure == "best":
        # the best of all evaluations would be chosen on the test data
        settings["measure"] = "final"
    trial = search.trial(0, best.changes, settings)
    write_json(path, choice)
    return trial
