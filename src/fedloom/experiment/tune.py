"""A search for a method's best parameters, on validation data alone: a grid, some of it, or Optuna's suggestions.

Each trial is a configuration; its runs, one a seed, are kept in `tune/` like all runs and are never repeated, so the same
search goes on where it was interrupted. What is searched on is `withhold`'s validation part of the clients' training data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedloom.algorithm import build, describe
from fedloom.errors import FedloomError, InvalidValue
from fedloom.experiment.configuration import VARYING, Configuration, configuration
from fedloom.experiment.directory import finished_runs, read_json, write_json
from fedloom.experiment.events import Event, RunName, Watch
from fedloom.experiment.jobs import Job, Tasks, job_of, require_possible
from fedloom.experiment.parameters import PREFIX, parameter_keys, with_parameters
from fedloom.experiment.pools import RunPool
from fedloom.experiment.settings import (
    Changes,
    Range,
    label,
    plain_text,
    read_axes,
    require_few,
    values_of,
    with_changes,
)
from fedloom.objectives import ACCURACY, Metric
from fedloom.randomness import numpy_stream
from fedloom.report.export import csv_text
from fedloom.report.summary import MEASURES, TO_TARGET, Spread, measured
from fedloom.state.files import write_text

SHARE = 0.2
"""Part of each client's training samples that is held out for validation unless `data.validation` says otherwise."""

FOLDER = "tune"


@dataclass(eq=False)
class Trial:
    """One choice of the searched keys, and what its runs gave: the measure by seed, or the reason why there is none."""

    number: int
    changes: Changes
    configuration: Configuration
    values: dict[int, float] = field(default_factory=dict)
    reason: str = ""
    metric: Metric = ACCURACY

    @property
    def spread(self) -> Spread | None:
        """Mean and deviation over the seeds; None until every seed has its figure."""
        return Spread.of(list(self.values.values())) if len(self.values) == len(self.seeds) else None

    @property
    def score(self) -> float | None:
        """What the best trial has most of: the mean over the seeds, negative where less is better."""
        return None if self.spread is None else self.signed(self.spread.mean)

    def signed(self, value: float) -> float:
        """A value of the metric as a score, of which more is better."""
        return value if self.metric.higher_is_better else -value

    @property
    def algorithm(self) -> str:
        assert self.configuration.algorithm is not None
        return self.configuration.algorithm

    @property
    def seeds(self) -> list[int]:
        return self.configuration.seeds or [self.configuration.seed]

    def name(self, seed: int) -> RunName:
        """The name of one of its runs; parameters of the method stand in the method."""
        own = {key: value for key, value in self.changes.items() if not key.startswith(PREFIX)}
        return RunName(self.algorithm, seed, label(own))


class Search:
    """What is searched: the table of a configuration, and the values that some of its keys may take.

    `searched` is a (nested) table like `[settings]`, with keys `algorithm.PARAMETER` beside the configuration's. `steps_needed`
    says whether ranges must name their steps. Raises `InvalidValue` or `UnknownName`, in one line, for what is not allowed.
    """

    def __init__(self, table: Mapping[str, Any], searched: Mapping[str, Any], *, steps_needed: bool = True) -> None:
        if "settings" in table:
            raise InvalidValue("fedloom tune searches in one setting: leave out settings, or search their keys")
        self.table = {key: value for key, value in table.items() if key != "algorithms"}
        told = configuration(table)
        self.algorithm = describe(build(told.only_method("tune")))
        self.told = told
        known = [*parameter_keys(self.algorithm), *(key for key in VARYING if key != "data.validation")]
        self.axes = read_axes(searched, known, steps_needed=steps_needed)
        if not self.axes:
            raise InvalidValue(
                "nothing to search: give --search KEY=[...], such as --search training.learning_rate=[0.01,0.1]"
            )
        if told.measure in TO_TARGET:
            allowed = ", ".join(MEASURES)
            raise InvalidValue(f"measure must be one of {allowed} for fedloom tune, not {told.measure!r}")
        if told.measure == "personal" and told.data.local_test is None:
            raise InvalidValue(
                "measure = 'personal' needs test data of the clients' own: give data.local_test, such as 0.25"
            )
        for changes in self._corners():
            self.trial(0, changes)

    @property
    def first(self) -> Changes:
        """The first value of each key."""
        return next(self._corners())

    @property
    def folder(self) -> Path:
        """Where the trials lie."""
        return self.told.folder / FOLDER

    def trial(self, number: int, changes: Changes) -> Trial:
        """The trial of some values. Raises `InvalidValue` for a value that is not allowed."""
        share = self.told.data.validation or SHARE
        table = self.chosen({**changes, "data.validation": share, "directory": str(self.folder)})
        return Trial(number, changes, configuration(table))

    def chosen(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The table of the configuration with these values."""
        parameters = {key: value for key, value in changes.items() if key.startswith(PREFIX)}
        others = {key: value for key, value in changes.items() if not key.startswith(PREFIX)}
        try:
            return with_changes({**self.table, "algorithm": with_parameters(self.algorithm, parameters)}, others)
        except FedloomError as error:
            raise InvalidValue(f"{label(parameters)}: {error}") from None

    def grid(self, trials: int | None = None) -> list[Trial]:
        """A trial for each combination of values, or `trials` of them drawn at random (by the stream (seed, "trials"))."""
        lists = [values_of(axis) for axis in self.axes.values()]
        sizes = [len(values) for values in lists]
        if trials is None or trials >= math.prod(sizes):
            require_few(sizes)
            every = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*lists)]
        else:
            drawn = sorted(numpy_stream(self.told.seed, "trials").choice(math.prod(sizes), trials, replace=False))
            places = zip(*np.unravel_index(drawn, sizes), strict=True)
            every = [
                {key: values[k] for key, values, k in zip(self.axes, lists, place, strict=True)} for place in places
            ]
        return [self.trial(number, changes) for number, changes in enumerate(every, start=1)]

    def _corners(self) -> Iterator[Changes]:
        """Every value of the lists and both ends of the ranges, each at least once."""
        ends = [[axis.low, axis.high] if isinstance(axis, Range) else axis for axis in self.axes.values()]
        for k in range(max(map(len, ends))):
            yield {key: values[min(k, len(values) - 1)] for key, values in zip(self.axes, ends, strict=True)}


class Runner:
    """Makes the runs of trials in a pool."""

    def __init__(self, pool: RunPool, watch: Watch, stopped: Callable[[], bool]) -> None:
        self.pool, self.watch, self.stopped = pool, watch, stopped

    def jobs(self, trials: Sequence[Trial], seeds: Sequence[int] | None = None) -> dict[RunName, Job]:
        """The jobs of the trials, with all their seeds or these; trials that are alike share theirs."""
        known = finished_runs(trials[0].configuration.folder)
        return {
            name: job_of(trial.configuration, name, known)
            for trial in trials
            for seed in (trial.seeds if seeds is None else seeds)
            for name in [trial.name(seed)]
        }

    def run(self, trials: Sequence[Trial], seeds: Sequence[int] | None = None) -> None:
        """Make the runs that are not finished yet and take down what all gave."""
        jobs = self.jobs(trials, seeds)
        for job in jobs.values():
            job.require()
            if job.finished:
                self.watch(Event("skipped", job.name, job.configuration.rounds))
        failed = self.pool.run([job for job in jobs.values() if not job.finished], self.watch, False, self.stopped)
        for trial in trials:
            told = trial.configuration
            for seed in trial.seeds if seeds is None else seeds:
                name = trial.name(seed)
                summary = None if name in failed else jobs[name].summary()
                value = None if summary is None else measured(summary, told.measure, told.last)
                if summary is None or value is None:
                    trial.reason = failed.get(name, "nothing was measured")
                else:
                    trial.values[seed], trial.metric = value, summary.metric


def search_grid(search: Search, runner: Runner, tasks: Tasks, trials: int | None = None) -> list[Trial]:
    """Make all trials of the grid; see `Search.grid`."""
    found = search.grid(trials)
    require_possible([job for job in runner.jobs(found).values() if not job.finished], tasks)
    runner.run(found)
    return found


def best_of(trials: Sequence[Trial]) -> Trial:
    """The trial with the highest score, the first of equals. Raises `InvalidValue` when none came to its end."""
    scored = [trial for trial in trials if trial.score is not None]
    if not scored:
        raise InvalidValue(f"none of {len(trials)} trials came to its end, the first: {trials[0].reason}")
    return max(scored, key=lambda trial: 0.0 if trial.score is None else trial.score)


def write_trials(search: Search, trials: Sequence[Trial]) -> Path:
    """Write every trial to `trials.csv` and the best one's configuration to `best.toml`, whose path is returned."""
    lines = [
        {
            "trial": trial.number,
            **{key: plain_text(trial.changes[key]) for key in search.axes},
            "algorithm": trial.algorithm,
            "validation": trial.spread and trial.spread.mean,
            "validation_std": trial.spread and trial.spread.std,
            "seeds": len(trial.values),
            "reason": trial.reason,
        }
        for trial in trials
    ]
    write_text(search.folder / "trials.csv", csv_text(lines, ["trial"]))
    best = search.folder / "best.toml"
    table = search.chosen(best_of(trials).changes)
    write_text(best, tomli_w.dumps({**table, "name": f"{search.told.name}-best"}))
    return best


def score_on_test(search: Search, best: Trial, runner: Runner) -> Trial:
    """The best choice trained on all training data and scored on the test data, which this search may look at once.

    Asked for again, the figure is read. Raises `InvalidValue` when the test data were used for another choice before: a
    second figure would be chosen by the first.
    """
    path = search.folder / "tested.json"
    choice = {key: plain_text(value) for key, value in best.changes.items()}
    if path.exists() and (before := read_json(path, dict, f"remove {path}")) != choice:
        raise InvalidValue(
            f"the test data of this search were used once, for {label(before)}: a second choice tested on them is no test "
            f"any more (remove {path} to do it all the same)"
        )
    table = search.chosen({**best.changes, "data.validation": "none", "directory": str(search.folder / "test")})
    if search.told.measure == "best":
        table["measure"] = "final"  # the best of all evaluations would be chosen on the test data
    trial = Trial(0, best.changes, configuration(table))
    write_json(path, choice)
    runner.run([trial])
    return trial
