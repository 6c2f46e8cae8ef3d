"""A search for the best parameters of a method, on validation data only: a grid, a sample of it, or
Optuna's suggestions.

Each trial is a configuration. Its runs, one for each seed, are in `tune/` and are never repeated,
so the same search continues where it was interrupted. Trials are judged on the validation data that
`withhold` takes from the clients' training data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedloom.algorithm.method import Method
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.common.randomness import numpy_stream
from fedloom.objectives import ACCURACY, Metric
from fedloom.report.sheet import measure_name
from fedloom.report.summary import MEASURES, TO_TARGET, Spread, accuracies, averaged
from fedloom.runs.config_file import VARYING, configuration, single_method
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import setting_folder
from fedloom.runs.entry import OWN_KEYS, Own, own_key
from fedloom.runs.events import RunName
from fedloom.runs.python_objects import PythonObjects
from fedloom.runs.settings import (
    Changes,
    Range,
    combinations,
    label,
    products,
    read_axes,
    values_of,
    with_changes,
)
from fedloom.study.parameters import PREFIX, parameter_keys, with_parameters
from fedloom.study.stored_runs import StoredRun

SHARE = 0.2
"""Default share of each client's training samples that is held out for validation."""


@dataclass(eq=False)
class Trial:
    """One choice of the searched keys, and the measure of its runs by seed, or the reason of a
    failure.
    """

    number: int
    changes: Changes
    configuration: Configuration = field(repr=False)
    values: dict[int, float] = field(default_factory=dict)
    reason: str = ""
    metric: Metric = ACCURACY
    runs: list[StoredRun] = field(default_factory=list, repr=False)

    @property
    def spread(self) -> Spread | None:
        """Mean and deviation over the seeds; None until every seed has its figure."""
        complete = len(self.values) == len(self.seeds)
        return Spread.of(list(self.values.values())) if complete else None

    @property
    def score(self) -> float | None:
        """The mean over the seeds, negative where less is better: the best trial has the highest
        score.
        """
        if self.spread is None:
            return None
        return self.spread.mean if self.metric.higher_is_better else -self.spread.mean

    @property
    def measure(self) -> str:
        """The measure in words, such as `accuracy after the last round`."""
        last = self.configuration.last
        counts = [averaged(run.summary, last) for run in self.runs if accuracies(run.summary)]
        return measure_name(self.configuration.measure, max(counts, default=last), self.metric)

    @property
    def algorithm(self) -> str:
        return self.configuration.only_method("tune")

    @property
    def seeds(self) -> list[int]:
        return self.configuration.seeds or [self.configuration.seed]

    def name(self, seed: int) -> RunName:
        """Return the name of a run; parameters of the method are in the method's expression."""
        changes = {key: value for key, value in self.changes.items() if not key.startswith(PREFIX)}
        return RunName(self.algorithm, seed, label(changes))


class Search:
    """The space of a search: the table of a configuration, and values of some keys such as
    `algorithm.mu`.

    `objects` are the method and the task of a search in Python. Keys that describe them cannot be
    searched. `own` are the settings of the method, by default those of the configuration.
    """

    def __init__(
        self,
        table: Mapping[str, Any],
        searched: Mapping[str, Any],
        *,
        steps_needed: bool = True,
        objects: PythonObjects | None = None,
        own: Own | None = None,
    ) -> None:
        self.objects = objects
        first = replace(configuration(table), objects=objects)
        name = first.only_method("tune")
        self.method = first.method(name)
        self.own = first.own.get(name, {}) if own is None else own
        self.table = single_method(table, first, name, self.own)
        self.configuration = base = replace(
            _without_method(self.table), algorithm=self.table["algorithm"], objects=objects
        )
        varying = (key for key in VARYING if objects is None or own_key(key) in OWN_KEYS)
        keys = [
            *parameter_keys(self.method),
            *(key for key in varying if key != "data.validation"),
        ]
        named = {
            PREFIX + key if PREFIX + key in keys else key: values
            for key, values in searched.items()
        }
        self.axes = read_axes(named, keys, steps_needed=steps_needed)
        if not self.axes:
            raise InvalidValue(
                "nothing to search: give keys with values, such as "
                "training.learning_rate=[0.01,0.1]"
            )
        if base.measure in TO_TARGET:
            allowed = ", ".join(MEASURES)
            raise InvalidValue(
                f"measure must be one of {allowed} for fedloom tune, not {base.measure!r}"
            )
        if base.measure == "personal" and base.data.local_test is None and objects is None:
            raise InvalidValue(
                "measure = 'personal' needs clients' own test data: give data.local_test, such "
                "as 0.25"
            )
        self.folder = base.folder / "tune"
        # Every value of the lists and both ends of the ranges must be allowed.
        ends = {
            key: [axis.low, axis.high] if isinstance(axis, Range) else axis
            for key, axis in self.axes.items()
        }
        for k in range(max(map(len, ends.values()))):
            self.trial(0, {key: values[min(k, len(values) - 1)] for key, values in ends.items()})

    def trial(self, number: int, changes: Changes, settings: Changes | None = None) -> Trial:
        """Return the trial of some values, by default on validation data.

        Args:
            number: Number of the trial, from 1; 0 for a trial outside the search.
            changes: A value for each searched key.
            settings: Further keys to set, such as `directory`; by default none.

        Returns:
            The trial, before its runs.

        Raises:
            InvalidValue: A value is not allowed.
        """
        share = self.configuration.data.validation or SHARE
        table = self.chosen(
            {**changes, "data.validation": share, "directory": str(self.folder), **(settings or {})}
        )
        checked = _without_method(table)
        objects = self.objects
        if objects is not None:
            method = self._method(changes)
            training = {name: getattr(checked.training, name) for name in table.get("training", {})}
            objects = replace(objects, methods={str(method): method}, training=training)
        return Trial(
            number, changes, replace(checked, algorithm=table["algorithm"], objects=objects)
        )

    def settings_of(self, trial: Trial) -> Own:
        """Return the settings of a trial that are not parameters of the method, with those that
        the method had before.
        """
        checked, settings = trial.configuration, dict(self.own)
        for key in trial.changes:
            if (name := own_key(key)) in OWN_KEYS:
                holder = checked.training if key.startswith("training.") else checked
                settings[name] = getattr(holder, name)
        return settings

    def chosen(self, changes: Changes) -> dict[str, Any]:
        """Return the table of the configuration with some keys set. Raises as `trial`."""
        settings = {key: value for key, value in changes.items() if not key.startswith(PREFIX)}
        return with_changes({**self.table, "algorithm": str(self._method(changes))}, settings)

    def _method(self, changes: Changes) -> Method:
        values = {key: value for key, value in changes.items() if key.startswith(PREFIX)}
        try:
            return with_parameters(self.method, values)
        except FedloomError as error:
            raise InvalidValue(f"{label(values)}: {error}") from None

    def grid(self, trials: int | None = None) -> list[Trial]:
        """Return a trial for each combination of values, or `trials` of them drawn by the stream
        (seed, "trials").
        """
        lists = {key: values_of(axis) for key, axis in self.axes.items()}
        sizes = [len(values) for values in lists.values()]
        if trials is None or trials >= math.prod(sizes):
            chosen = products(lists)
        else:
            generator = numpy_stream(self.configuration.seed, "trials")
            drawn = sorted(generator.choice(math.prod(sizes), trials, replace=False))
            chosen = [
                {key: values[k] for (key, values), k in zip(lists.items(), indices, strict=True)}
                for indices in zip(*np.unravel_index(drawn, sizes), strict=True)
            ]
        return [self.trial(number, changes) for number, changes in enumerate(chosen, start=1)]


def _without_method(table: Mapping[str, Any]) -> Configuration:
    """Return the configuration of a table but for its method, which may be an object."""
    return configuration({key: value for key, value in table.items() if key != "algorithm"})


def searches(
    table: Mapping[str, Any], searched: Mapping[str, Any], *, steps_needed: bool = True
) -> list[tuple[Changes, Search]]:
    """Return the search of each setting, with the changes of the setting.

    Args:
        table: Table of the configuration.
        searched: Values by key: lists, or ranges with `from` and `to`.
        steps_needed: Require the number of steps of a range, as a grid needs.

    Returns:
        Pairs of changes and search. Each search has its own folder. Without settings, one pair with
        no changes.
    """
    base = {key: value for key, value in table.items() if key != "settings"}
    if "settings" not in table:
        return [({}, Search(base, searched, steps_needed=steps_needed))]
    folder, pairs = configuration(base).folder, []
    for changes in combinations(table["settings"], VARYING):
        inside = with_changes(
            base, {**changes, "directory": str(setting_folder(folder, label(changes)))}
        )
        pairs.append((changes, Search(inside, searched, steps_needed=steps_needed)))
    return pairs


def best_of(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the highest score, the first of equals. Raises `InvalidValue` when none
    came to its end.
    """
    scored = [trial for trial in trials if trial.score is not None]
    if not scored:
        raise InvalidValue(
            f"none of {len(trials)} trials came to its end, the first: {trials[0].reason}"
        )
    return max(scored, key=lambda trial: 0.0 if trial.score is None else trial.score)
