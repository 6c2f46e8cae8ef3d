"""Trials that Optuna suggests, each from what those before it gave."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from fedloom.errors import FedloomError, MissingExtra
from fedloom.experiment.settings import Axis, Changes, Range
from fedloom.experiment.tune import Runner, Search, Trial

TRIALS = 20
"""Trials unless told otherwise."""

STARTUP = 5
"""Trials that come to their end before any is given up."""


def search_optuna(search: Search, runner: Runner, trials: int = TRIALS, together: int = 1) -> list[Trial]:
    """Make `trials` trials, `together` at a time, as Optuna's TPE sampler suggests them.

    With several seeds, a trial whose mean so far is below the median of the others at the same seed is given up (Optuna's
    `MedianPruner`). The sampler draws by the configuration's seed, so the same search suggests the same trials, whose
    finished runs are only read: it goes on where it stopped, as long as `together` and Optuna's version stay the same.
    Raises `MissingExtra` without Optuna.
    """
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=search.told.seed, constant_liar=together > 1)
    study = optuna.create_study(
        direction="maximize", sampler=sampler, pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP)
    )
    spaces = {key: _space(optuna, axis) for key, axis in search.axes.items()}
    found: list[Trial] = []
    while len(found) < trials:
        asked = [
            study.ask({key: space for key, (space, _) in spaces.items()})
            for _ in range(min(together, trials - len(found)))
        ]
        batch: list[Trial] = []
        for number, one in enumerate(asked, start=len(found) + 1):
            changes: Changes = {key: value_of(one.params[key]) for key, (_, value_of) in spaces.items()}
            batch.append(_trial(search, number, changes))
        _make(runner, batch, asked)
        for trial, one in zip(batch, asked, strict=True):
            state = None if trial.score is not None else optuna.trial.TrialState.FAIL
            if trial.reason.startswith(_GIVEN_UP):
                state = optuna.trial.TrialState.PRUNED
            study.tell(one, trial.score, state=state) if state is None else study.tell(one, state=state)
        found += batch
    return found


_GIVEN_UP = "given up"


def _make(runner: Runner, batch: list[Trial], asked: list[Any]) -> None:
    """Run the batch seed by seed, without the trials that failed or are hopeless."""
    live = [(trial, one) for trial, one in zip(batch, asked, strict=True) if not trial.reason]
    for step, seed in enumerate(batch[0].seeds):
        if not live:
            return
        runner.run([trial for trial, _ in live], [seed])
        live = [(trial, one) for trial, one in live if not trial.reason]
        for trial, one in live:
            one.report(trial.signed(sum(trial.values.values()) / len(trial.values)), step)
            if step + 1 < len(trial.seeds) and one.should_prune():
                trial.reason = f"{_GIVEN_UP} after {step + 1} of {len(trial.seeds)} seeds"
        live = [(trial, one) for trial, one in live if not trial.reason]


def _trial(search: Search, number: int, changes: Changes) -> Trial:
    """The trial; values that do not go together are its reason to fail, not the search's."""
    try:
        return search.trial(number, changes)
    except FedloomError as error:
        return Trial(number, changes, search.trial(number, search.first).configuration, reason=str(error))


def _space(optuna: Any, axis: Axis) -> tuple[Any, Callable[[Any], Any]]:
    """Optuna's distribution, and what turns its value into ours. Lists and steps are told apart by their places: some values
    (lists, methods) are none that Optuna knows, and places of steps have an order."""
    if isinstance(axis, Range) and axis.steps is not None:
        values = axis.values()
        return optuna.distributions.IntDistribution(0, len(values) - 1), values.__getitem__
    if isinstance(axis, Range) and axis.whole:
        return optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.logarithmic), int
    if isinstance(axis, Range):
        return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.logarithmic), _six_digits
    return optuna.distributions.CategoricalDistribution(tuple(range(len(axis)))), axis.__getitem__


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise MissingExtra("optuna", "tune", "fedloom tune --optuna") from error
