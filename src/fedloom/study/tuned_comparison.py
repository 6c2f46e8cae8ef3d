"""Tune each method of a comparison by itself: on validation data, with the same number of trials.

The searches are in the folders of the methods, so the same call continues them. Each one ends with
the settings of a method, with which the comparison trains on all training data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fedloom.common.errors import InvalidValue
from fedloom.report.tuning_choice import TUNING, TuningChoice
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import folder_name, setting_folder, write_json
from fedloom.runs.entry import OWN_KEYS, full_keys, named, own_key
from fedloom.runs.progress import Show
from fedloom.runs.settings import Axis, read_axes, values_of, with_changes
from fedloom.study.parameters import PREFIX, parameter_keys
from fedloom.study.search import Search
from fedloom.study.tune import run_search
from fedloom.study.tune_result import TuneResult

Shown = Callable[[str, int], Show]
"""Returns the progress of a search, from its title and the rounds of its runs."""


@dataclass(frozen=True)
class _MethodSearch:
    """The search of one method in one setting."""

    setting: str
    name: str
    search: Search

    @property
    def size(self) -> int:
        return math.prod(len(values_of(axis)) for axis in self.search.axes.values())


def tune_methods(
    table: Mapping[str, Any],
    plan: Configuration,
    searched: Mapping[str, Any],
    trials: int | None,
    shown: Shown,
) -> Configuration:
    """Tune each method in each setting, and return the configuration with the best settings.

    Args:
        table: The table of the configuration.
        plan: The configuration.
        searched: Values by key, as for `fl.tune`. A method is searched over the keys that it has
            and does not set itself.
        trials: Number of trials of each method, drawn at random from larger grids; None for the
            whole grids, which must have the same size.
        shown: Shows the progress of each search.

    Returns:
        The configuration without a search. Each method has its best settings, and all training data
        are used.

    Raises:
        InvalidValue: A key or a value is not allowed, the grids differ in size, or no trial of a
            method came to its end.
    """
    searches = _searches(table, plan, _axes(plan, searched))
    _require_equal_budgets(searches, trials)
    results: dict[str, dict[str, TuneResult]] = {setting: {} for setting in plan.settings}
    for one in searches:
        title = ", ".join(filter(None, (f"tuning {one.name}", one.setting)))
        show = shown(title, one.search.configuration.rounds)
        results[one.setting][one.name] = run_search(one.search, show, trials, False, False)
    for setting, tuned in results.items():
        found = {one.name: one for one in searches if one.setting == setting}
        lines = {name: _choice(result, found[name]).to_plain() for name, result in tuned.items()}
        write_json(setting_folder(plan.folder, setting) / TUNING, {"methods": lines})
    variants = {
        setting: _chosen(variant, results[setting]) for setting, variant in plan.variants.items()
    }
    return replace(_chosen(plan, results.get("", {})), variants=variants)


def _axes(plan: Configuration, searched: Mapping[str, Any]) -> dict[str, Axis]:
    """Return the values by full key; each key belongs to some method, and to no setting."""
    keys = list(full_keys(dict.fromkeys(OWN_KEYS)))
    for name in plan.methods:
        keys += [key for key in parameter_keys(plan.method(name)) if key not in keys]
    full = {PREFIX + key if PREFIX + key in keys else key: v for key, v in searched.items()}
    axes = read_axes(full, keys)
    for key in axes:
        if any(own_key(key) in map(own_key, variant.changes) for variant in plan.variants.values()):
            raise InvalidValue(f"{key} cannot be tuned: the settings give it")
    return axes


def _searches(
    table: Mapping[str, Any], plan: Configuration, axes: Mapping[str, Axis]
) -> list[_MethodSearch]:
    """Return the searches of all methods that have one of the keys."""
    left_out = ("settings", "methods", "algorithms", "algorithm")
    base = {key: value for key, value in table.items() if key not in left_out}
    searches = []
    for setting, variant in plan.settings.items():
        for name in variant.methods:
            method, own = variant.method(name), variant.own.get(name, {})
            keys = [*parameter_keys(method), *full_keys(dict.fromkeys(OWN_KEYS))]
            inside = {
                key: axis for key, axis in axes.items() if key in keys and own_key(key) not in own
            }
            if not inside:
                continue
            folder = setting_folder(plan.folder, setting) / folder_name(named(name, own))
            single = with_changes(base, {**variant.changes, "directory": str(folder)})
            objects = plan.objects and replace(plan.objects, methods={name: method})
            if objects is None:
                single["algorithm"] = str(method)
            search = Search(single, inside, objects=objects, own=own)
            searches.append(_MethodSearch(setting, name, search))
    if not searches:
        key = next(iter(axes), "")
        raise InvalidValue(f"nothing to tune: every method sets {key} itself, or no key is given")
    return searches


def _require_equal_budgets(searches: list[_MethodSearch], trials: int | None) -> None:
    """Raise `InvalidValue` for grids of different sizes without a number of trials."""
    sizes = {one.name: one.size for one in searches}
    if trials is None and len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise InvalidValue(
            f"the methods have grids of different sizes ({listed}): give trials, the same number "
            f"for each, such as {min(sizes.values())}"
        )


def _chosen(plan: Configuration, results: Mapping[str, TuneResult]) -> Configuration:
    """Return a configuration with the best settings of the tuned methods, judged on test data."""
    methods = {name: plan.method(name) for name in plan.methods}
    entries = {name: result.method for name, result in results.items()}
    methods |= {name: entry.algorithm for name, entry in entries.items()}
    own = plan.own | {name: entry.settings for name, entry in entries.items()}
    objects = plan.objects and replace(plan.objects, methods=methods)
    return replace(
        plan,
        algorithm=None,
        algorithms={name: str(method) for name, method in methods.items()},
        own=own,
        objects=objects,
        tuned={name: result.settings for name, result in results.items()},
        data=replace(plan.data, validation=None),
    )


def _choice(result: TuneResult, one: _MethodSearch) -> TuningChoice:
    """Return the choice of a method."""
    best = result.best
    assert best.spread is not None
    edges = []
    for key, axis in one.search.axes.items():
        values = values_of(axis)
        with suppress(TypeError):  # values without an order
            edge = best.changes[key] in (min(values), max(values))
            if len(values) > 1 and edge and not isinstance(values[0], str | bool):
                edges.append(key)
    return TuningChoice(
        best.changes,
        best.spread,
        best.measure,
        len(result.trials),
        len(best.seeds),
        one.size,
        edges,
    )
