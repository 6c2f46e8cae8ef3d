"""`fedloom tune`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import File, Overrides, Quiet, option, shown

if TYPE_CHECKING:
    from fedloom.experiment.tune import Search, Trial

Searched = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUES", help="A key with a list or range of values.")]
Trials = Annotated[int | None, option(metavar="N", help="Number of trials; of a grid, drawn at random.")]
Optuna = Annotated[bool, typer.Option("--optuna", help="Let Optuna suggest the trials, 20 by default.")]
Test = Annotated[bool, typer.Option("--test", help="Score the best choice on the test data, which can be done once.")]

_SHOWN = 20  # trials in the terminal's table


def tune(
    file: File,
    overrides: Overrides = None,
    search: Searched = None,
    trials: Trials = None,
    optuna: Optuna = False,
    test: Test = False,
    quiet: Quiet = False,
) -> None:
    """Search a method's parameters, on validation data alone.

    FILE.toml is the configuration, KEY=VALUE changes one of its keys. --search algorithm.mu=[0.01,0.1] searches a parameter
    of the method, --search training.learning_rate={from=0.001,to=1,steps=4,scale=log} any key. A fifth of each client's
    training samples (data.validation) is held out to judge by. The same command goes on after an interruption.
    """
    from fedloom.config.fields import require_at_least
    from fedloom.experiment.configuration import put, read_table
    from fedloom.experiment.settings import label
    from fedloom.experiment.tune import searches

    if trials is not None:
        require_at_least("--trials", trials, 1)
    searched: dict[str, Any] = {}
    for text in search or []:
        put(searched, text, "algorithm.mu=[0.01,0.1] or training.learning_rate=[0.01,0.1]")
    for changes, space in searches(read_table(file, overrides or []), searched, steps_needed=not optuna):
        if changes:
            print(f"\n{label(changes)}")
        _tune(space, trials, optuna, test, quiet)


def _tune(space: Search, trials: int | None, optuna: bool, test: bool, quiet: bool) -> None:
    from fedloom.experiment.cores import runs_side_by_side
    from fedloom.experiment.jobs import Tasks, require_possible
    from fedloom.experiment.pools import make_pool
    from fedloom.experiment.suggest import TRIALS, search_optuna
    from fedloom.experiment.tune import best_of, final_trial, jobs_of, run_trials, write_trials
    from fedloom.report.sheet import measure_name

    plan = space.configuration
    completed = [] if optuna else space.grid(trials)
    count = (trials or TRIALS) if optuna else len(completed)
    runs = count * len(plan.seeds or [plan.seed])
    tasks = Tasks()
    workers = plan.runs_at_a_time if optuna else runs_side_by_side(plan, runs)  # Optuna waits for the trials under way
    with closing(make_pool(replace(plan, workers=workers), workers if optuna else runs, runs, tasks)) as pool:
        with shown(runs, plan.rounds, quiet) as (watch, stopped):
            if optuna:
                completed = search_optuna(space, lambda batch: run_trials(batch, pool, watch, stopped), count, workers)
            else:
                require_possible([job for job in jobs_of(completed).values() if not job.finished], tasks)
                run_trials(completed, pool, watch, stopped)
        best = best_of(completed)
        path = write_trials(space, completed)
        _print(space, completed, best)
        print(f"trials: {space.folder / 'trials.csv'}")
        print(f"best:   fedloom run {shlex.quote(str(path))}")
        if test:
            with shown(len(best.seeds), plan.rounds, quiet) as (watch, stopped):
                tested = final_trial(space, best)
                run_trials([tested], pool, watch, stopped)
            seeds = f" over {len(tested.values)} seeds" if len(tested.values) > 1 else ""
            measure = measure_name(tested.configuration.measure, tested.configuration.last, tested.metric)
            print(f"test:   {_score(tested)}{tested.metric.unit}{seeds}, {measure}, trained on all training data")


def _print(search: Search, trials: Sequence[Trial], best: Trial) -> None:
    """Print the best trials, then those without a figure."""
    from rich.console import Console

    from fedloom.cli.terminal import text_table
    from fedloom.experiment.settings import plain_text
    from fedloom.report.sheet import measure_name

    ranked = sorted(trials, key=lambda trial: (trial.score is None, -(trial.score or 0.0), trial.number))[:_SHOWN]
    keys = list(search.axes)
    lines = [[str(trial.number), *(plain_text(trial.changes[k]) for k in keys), _score(trial)] for trial in ranked]
    measure = measure_name(search.configuration.measure, search.configuration.last, best.metric)
    caption = f"{measure} on validation data{', %' if best.metric.share else ''}"
    if len(trials) > len(ranked):
        caption = f"{len(ranked)} best of {len(trials)} trials; {caption}"
    table = text_table(["Trial", *keys, "Validation"], lines, caption, ranked.index(best))
    Console(highlight=False).print(table)


def _score(trial: Trial) -> str:
    from fedloom.report.cells import score_cell

    return score_cell(trial.spread, trial.metric).text if trial.spread else trial.reason or "–"
