"""A search for a method's best parameters, on validation data alone: a grid, a sample of it, or Optuna's suggestions.

Each trial is a configuration; its runs, one a seed, lie in `tune/` like all runs and are never repeated, so the same search
goes on where it was interrupted. Trials are judged on the validation data that `withhold` takes from the clients' training data.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedloom.errors import FedloomError, InvalidValue
from fedloom.experiment.configuration import VARYING, Configuration, configuration
from fedloom.experiment.directory import finished_runs, read_json, setting_folder, write_json
from fedloom.experiment.events import RunName, Watch
from fedloom.experiment.jobs import Job, job_of, unfinished
from fedloom.experiment.parameters import PREFIX, parameter_keys, with_parameters
from fedloom.experiment.pools import RunPool
from fedloom.experiment.settings import (
    Changes,
    Range,
    combinations,
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
"""Share of each client's training samples that is held out for validation unless `data.validation` says otherwise."""


@dataclass(eq=False)
class Trial:
    """One choice of the searched keys, and the measure of its runs by seed, or the reason why there is none."""

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
        """The mean over the seeds, negative where less is better: the best trial has the highest score."""
        return None if self.spread is None else self.spread.mean * (1 if self.metric.higher_is_better else -1)

    @property
    def algorithm(self) -> str:
        assert self.configuration.algorithm is not None
        return self.configuration.algorithm

    @property
    def seeds(self) -> list[int]:
        return self.configuration.seeds or [self.configuration.seed]

    def name(self, seed: int) -> RunName:
        """Return the name of a run; parameters of the method are in the method's expression."""
        changes = {key: value for key, value in self.changes.items() if not key.startswith(PREFIX)}
        return RunName(self.algorithm, seed, label(changes))


class Search:
    """The space of a search: a configuration's table and the values of some keys, such as `algorithm.mu`."""

    def __init__(self, table: Mapping[str, Any], searched: Mapping[str, Any], *, steps_needed: bool = True) -> None:
        self.table = {key: value for key, value in table.items() if key != "algorithms"}
        self.configuration = base = configuration(table)
        self.algorithm = str(base.method(base.only_method("tune")))
        keys = [*parameter_keys(self.algorithm), *(key for key in VARYING if key != "data.validation")]
        self.axes = read_axes(searched, keys, steps_needed=steps_needed)
        if not self.axes:
            raise InvalidValue(
                "nothing to search: give --search KEY=[...], such as --search training.learning_rate=[0.01,0.1]"
            )
        if base.measure in TO_TARGET:
            allowed = ", ".join(MEASURES)
            raise InvalidValue(f"measure must be one of {allowed} for fedloom tune, not {base.measure!r}")
        if base.measure == "personal" and base.data.local_test is None:
            raise InvalidValue(
                "measure = 'personal' needs test data of the clients' own: give data.local_test, such as 0.25"
            )
        self.folder = base.folder / "tune"
        # Every value of the lists and both ends of the ranges must be allowed.
        ends = [[axis.low, axis.high] if isinstance(axis, Range) else axis for axis in self.axes.values()]
        for k in range(max(map(len, ends))):
            self.trial(0, {key: values[min(k, len(values) - 1)] for key, values in zip(self.axes, ends, strict=True)})

    def trial(self, number: int, changes: Changes) -> Trial:
        """Return the trial of some values. Raises `InvalidValue` for a value that is not allowed."""
        share = self.configuration.data.validation or SHARE
        table = self.chosen({**changes, "data.validation": share, "directory": str(self.folder)})
        return Trial(number, changes, configuration(table))

    def chosen(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        parameters = {key: value for key, value in changes.items() if key.startswith(PREFIX)}
        settings = {key: value for key, value in changes.items() if not key.startswith(PREFIX)}
        try:
            return with_changes({**self.table, "algorithm": with_parameters(self.algorithm, parameters)}, settings)
        except FedloomError as error:
            raise InvalidValue(f"{label(parameters)}: {error}") from None

    def grid(self, trials: int | None = None) -> list[Trial]:
        """Return a trial for each combination of values, or `trials` of them drawn by the stream (seed, "trials")."""
        lists = [values_of(axis) for axis in self.axes.values()]
        sizes = [len(values) for values in lists]
        if trials is None or trials >= math.prod(sizes):
            require_few(sizes)
            every = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*lists)]
        else:
            generator = numpy_stream(self.configuration.seed, "trials")
            drawn = sorted(generator.choice(math.prod(sizes), trials, replace=False))
            every = [
                {key: values[k] for key, values, k in zip(self.axes, lists, indices, strict=True)}
                for indices in zip(*np.unravel_index(drawn, sizes), strict=True)
            ]
        return [self.trial(number, changes) for number, changes in enumerate(every, start=1)]


def searches(
    table: Mapping[str, Any], searched: Mapping[str, Any], *, steps_needed: bool = True
) -> list[tuple[Changes, Search]]:
    """Return what each setting of a table changes, and a search in the setting's folder; one search without settings."""
    base = {key: value for key, value in table.items() if key != "settings"}
    if "settings" not in table:
        return [({}, Search(base, searched, steps_needed=steps_needed))]
    folder, pairs = configuration(base).folder, []
    for changes in combinations(table["settings"], VARYING):
        inside = with_changes(base, {**changes, "directory": str(setting_folder(folder, label(changes)))})
        pairs.append((changes, Search(inside, searched, steps_needed=steps_needed)))
    return pairs


def jobs_of(trials: Sequence[Trial]) -> dict[RunName, Job]:
    """Return the runs of the trials, with all their seeds; trials that are alike share theirs."""
    finished = finished_runs(trials[0].configuration.folder)
    names = {trial.name(seed): trial.configuration for trial in trials for seed in trial.seeds}
    return {name: job_of(configuration, name, finished) for name, configuration in names.items()}


def run_trials(trials: Sequence[Trial], pool: RunPool, watch: Watch, stopped: Callable[[], bool]) -> None:
    """Make the runs that are not finished yet and note the measure of all."""
    jobs = jobs_of(trials)
    failed = pool.run(unfinished(jobs.values(), watch), watch, False, stopped)
    for trial in trials:
        for seed in trial.seeds:
            name, value = trial.name(seed), None
            if name not in failed:
                summary = jobs[name].summary()
                trial.metric = summary.metric
                value = measured(summary, trial.configuration.measure, trial.configuration.last)
            if value is None:
                trial.reason = failed.get(name, "nothing was measured")
            else:
                trial.values[seed] = value


def best_of(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the highest score, the first of equals. Raises `InvalidValue` when none came to its end."""
    scored = [trial for trial in trials if trial.score is not None]
    if not scored:
        raise InvalidValue(f"none of {len(trials)} trials came to its end, the first: {trials[0].reason}")
    return max(scored, key=lambda trial: 0.0 if trial.score is None else trial.score)


def write_trials(search: Search, trials: Sequence[Trial]) -> Path:
    """Write every trial to `trials.csv` and the configuration of the best to `best.toml`; return its path."""
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
    write_text(best, tomli_w.dumps({**table, "name": f"{search.configuration.name}-best"}))
    return best


def final_trial(search: Search, best: Trial) -> Trial:
    """Return the trial that trains the best choice on all training data and judges it on the test data, which happens once."""
    path = search.folder / "tested.json"
    choice = {key: plain_text(value) for key, value in best.changes.items()}
    if path.exists() and (tested := read_json(path, dict, f"remove {path}")) != choice:
        raise InvalidValue(
            f"the test data of this search were used once, for {label(tested)}: a second choice tested on them is no test "
            f"any more (remove {path} to do it all the same)"
        )
    table = search.chosen({**best.changes, "data.validation": "none", "directory": str(search.folder / "test")})
    if search.configuration.measure == "best":
        table["measure"] = "final"  # the best of all evaluations would be chosen on the test data
    trial = Trial(0, best.changes, configuration(table))
    write_json(path, choice)
    return trial
