"""Trials that Optuna suggests from the results of earlier ones."""

import warnings
from collections.abc import Callable
from typing import Any

from fedloom.common.errors import import_extra
from fedloom.runs.settings import Axis, Range, values_of
from fedloom.study.search import Search, Trial

TRIALS = 20
"""Default number of trials."""


def search_optuna(
    search: Search, run: Callable[[list[Trial]], None], trials: int = TRIALS, batch_size: int = 1
) -> list[Trial]:
    """Let Optuna's TPE sampler suggest trials.

    The configuration's seed draws the suggestions. The same search suggests the same trials, and
    only reads their finished runs, if `batch_size` and Optuna's version stay the same.

    Args:
        search: The space.
        run: Makes the runs of trials.
        trials: Number of trials.
        batch_size: Number of trials at a time.

    Returns:
        The trials with their measures.

    Raises:
        MissingExtra: Optuna is not installed.
    """
    optuna = import_extra("optuna", "tune", "fedloom tune --optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = search.configuration.seed
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=batch_size > 1)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    space = {key: _distribution(optuna, axis) for key, axis in search.axes.items()}
    completed: list[Trial] = []
    while len(completed) < trials:
        suggestions = [study.ask(space) for _ in range(min(batch_size, trials - len(completed)))]
        batch = []
        for number, suggestion in enumerate(suggestions, start=len(completed) + 1):
            values = {
                key: _value(axis, suggestion.params[key]) for key, axis in search.axes.items()
            }
            batch.append(search.trial(number, values))
        run(batch)
        for trial, suggestion in zip(batch, suggestions, strict=True):
            failed = optuna.trial.TrialState.FAIL if trial.score is None else None
            study.tell(suggestion, trial.score, state=failed)
        completed += batch
    return completed


def _distribution(optuna: Any, axis: Axis) -> Any:
    """Return Optuna's distribution of an axis, of indices for lists and steps."""
    distributions = optuna.distributions
    if not isinstance(axis, Range):
        return distributions.CategoricalDistribution(tuple(range(len(axis))))
    if axis.steps is not None:
        return distributions.IntDistribution(0, axis.steps - 1)
    kind = distributions.IntDistribution if axis.integral else distributions.FloatDistribution
    return kind(axis.low, axis.high, log=axis.logarithmic)


def _value(axis: Axis, suggested: Any) -> Any:
    if not isinstance(axis, Range) or axis.steps is not None:
        return values_of(axis)[suggested]
    return suggested if axis.integral else float(f"{suggested:.6g}")
