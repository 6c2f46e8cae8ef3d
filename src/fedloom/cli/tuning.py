"""`fedloom tune`, and the searches of `fedloom compare --tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import File, Overrides, Quiet, Trials, shown
from fedloom.common.errors import InvalidValue

if TYPE_CHECKING:
    from fedloom.runs.configuration import Configuration
    from fedloom.runs.progress import Display, Show

_EXAMPLE = "training.learning_rate=[0.01,0.1]"

Searched = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUES", help="A key with a list or range of values."),
]
Optuna = Annotated[
    bool, typer.Option("--optuna", help="Let Optuna suggest the trials, 20 by default.")
]
Test = Annotated[
    bool,
    typer.Option("--test", help="Score the best choice on the test data, only possible once."),
]


def tune(
    file: File,
    overrides: Overrides = None,
    search: Searched = None,
    trials: Trials = None,
    optuna: Optuna = False,
    test: Test = False,
    quiet: Quiet = False,
) -> None:
    """Search a method's parameters, using only validation data.

    FILE.toml is the configuration, KEY=VALUE changes one of its keys. --search
    algorithm.mu=[0.01,0.1] searches a parameter of the method, --search
    training.learning_rate={from=0.001,to=1,steps=4,scale=log} any key. A fifth of each client's
    training samples (data.validation) is held out for validation. After an interruption, the same
    command continues.
    """
    from rich.console import Console

    from fedloom.cli.terminal import shown_table
    from fedloom.runs.config_file import put, read_table
    from fedloom.runs.settings import label
    from fedloom.study.search import searches
    from fedloom.study.tune import run_search

    searched: dict[str, Any] = {}
    for text in search or []:
        put(searched, text, "algorithm.mu=[0.01,0.1] or training.learning_rate=[0.01,0.1]")
    for changes, space in searches(
        read_table(file, overrides or []), searched, steps_needed=not optuna
    ):
        if changes:
            print(f"\n{label(changes)}")
        show = partial(shown, rounds=space.configuration.rounds, quiet=quiet)
        result = run_search(space, show, trials, optuna, test)
        Console(highlight=False).print(shown_table(result.shown))
        print("\n".join(result.notes))


def tuned_plan(
    file: Path, overrides: Overrides, tune: Sequence[str], trials: int | None, quiet: bool
) -> Configuration:
    """Return the configuration of a comparison, after the searches of its methods.

    Args:
        file: The configuration file.
        overrides: Changes of its keys, each as KEY=VALUE.
        tune: Values to search, each as KEY=VALUES; empty for no search.
        trials: Number of trials of each method; None for whole grids.
        quiet: Show no progress of the searches.

    Returns:
        The configuration, with the best settings of each method if there was a search.

    Raises:
        InvalidValue: `trials` is given without `tune`, or as in `tune_methods`.
    """
    from fedloom.runs.config_file import configuration, put, read_table
    from fedloom.study.tuned_comparison import tune_methods

    table = read_table(file, overrides or [])
    plan = configuration(table)
    if not tune:
        if trials is not None:
            raise InvalidValue(f"--trials {trials} needs --tune, such as --tune '{_EXAMPLE}'")
        return plan
    searched: dict[str, Any] = {}
    for text in tune:
        put(searched, text, _EXAMPLE)

    def progress_of(title: str, rounds: int) -> Show:
        @contextmanager
        def show(runs: int) -> Iterator[tuple[Display, Callable[[], bool]]]:
            with shown(runs, rounds, quiet) as (watch, stopped):
                watch.line(f"{title}: {runs} runs")
                yield watch, stopped

        return show

    return tune_methods(table, plan, searched, trials, progress_of)
