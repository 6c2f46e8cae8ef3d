"""Trials that Optuna suggests from the results of earlier ones."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from fedloom.errors import FedloomError, MissingExtra
from fedloom.experiment.settings import Axis, Changes, Range
from fedloom.experiment.tune import Runner, Search, Trial

TRIALS = 20
"""Default number of trials."""

STARTUP = 5
"""Trials that come to their end before any is given up."""


def search_optuna(search: Search, runner: Runner, trials: int = TRIALS, batch_size: int = 1) -> list[Trial]:
    """Make `trials` trials, `batch_size` at a time, as Optuna's TPE sampler suggests them.

    The sampler draws by the configuration's seed: the same search suggests the same trials, whose finished runs are only read,
    as long as `batch_size` and Optuna's version stay the same. Raises `MissingExtra` without Optuna.
    """
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError as error:
        raise MissingExtra("optuna", "tune", "fedloom tune --optuna") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        sampler = optuna.samplers.TPESampler(seed=search.configuration.seed, constant_liar=batch_size > 1)
    study = optuna.create_study(
        direction="maximize", sampler=sampler, pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP)
    )
    spaces = {key: _space(optuna, axis) for key, axis in search.axes.items()}
    completed: list[Trial] = []
    while len(completed) < trials:
        suggestions = [
            study.ask({key: space for key, (space, _) in spaces.items()})
            for _ in range(min(batch_size, trials - len(completed)))
        ]
        batch: list[Trial] = []
        for number, suggestion in enumerate(suggestions, start=len(completed) + 1):
            changes: Changes = {key: value_of(suggestion.params[key]) for key, (_, value_of) in spaces.items()}
            batch.append(_trial(search, number, changes))
        _make(runner, batch, suggestions)
        for trial, suggestion in zip(batch, suggestions, strict=True):
            state = None if trial.score is not None else optuna.trial.TrialState.FAIL
            if trial.reason.startswith(_GIVEN_UP):
                state = optuna.trial.TrialState.PRUNED
            study.tell(suggestion, trial.score if state is None else None, state=state)
        completed += batch
    return completed


_GIVEN_UP = "given up"


def _make(runner: Runner, batch: list[Trial], suggestions: list[Any]) -> None:
    """Run the batch seed by seed, without the trials that failed or are hopeless."""
    live = [(trial, suggestion) for trial, suggestion in zip(batch, suggestions, strict=True) if not trial.reason]
    for step, seed in enumerate(batch[0].seeds):
        if not live:
            return
        runner.run([trial for trial, _ in live], [seed])
        for trial, suggestion in live:
            if not trial.reason:
                suggestion.report(trial.signed(sum(trial.values.values()) / len(trial.values)), step)
                if step + 1 < len(trial.seeds) and suggestion.should_prune():
                    trial.reason = f"{_GIVEN_UP} after {step + 1} of {len(trial.seeds)} seeds"
        live = [(trial, suggestion) for trial, suggestion in live if not trial.reason]


def _trial(search: Search, number: int, changes: Changes) -> Trial:
    """Return the trial; values that do not fit each other fail it, not the search."""
    try:
        return search.trial(number, changes)
    except FedloomError as error:
        return Trial(number, changes, search.trial(number, next(search.corners())).configuration, reason=str(error))


def _space(optuna: Any, axis: Axis) -> tuple[Any, Callable[[Any], Any]]:
    """Return Optuna's distribution, of indices for lists and steps, and the function from its values to ours."""
    if isinstance(axis, Range) and axis.steps is not None:
        values = axis.values()
        return optuna.distributions.IntDistribution(0, len(values) - 1), values.__getitem__
    if isinstance(axis, Range) and axis.integral:
        return optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.logarithmic), int
    if isinstance(axis, Range):
        return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.logarithmic), lambda value: float(
            f"{value:.6g}"
        )
    return optuna.distributions.CategoricalDistribution(tuple(range(len(axis)))), axis.__getitem__
