"""`fedloom run` and `fedloom compare`."""

from __future__ import annotations

from functools import cache
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any

import typer

from fedloom.cli.options import (
    File,
    Fresh,
    Overrides,
    Quiet,
    Trials,
    require_finished,
    shown,
    this_command,
)
from fedloom.cli.tuning import tuned_plan

Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Print the speed of training relative to a large matrix product."
    ),
]

Tuned = Annotated[
    list[str] | None,
    typer.Option(
        "--tune", metavar="KEY=VALUES", help="Tune each method first: a key with its values."
    ),
]


def run(
    file: File,
    overrides: Overrides = None,
    fresh: Fresh = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train one method with one seed.

    FILE.toml is the configuration; KEY=VALUE changes one of its keys, such as algorithm=fedmr or
    training.learning_rate=0.1. A rule chooses where clients train; engine=rows, stacked, processes
    or ray sets it. After an interruption, the same command continues; with more rounds=..., it
    lengthens a run, finished or not.
    """
    from fedloom.common.expression import parse
    from fedloom.report.frames import result_lines
    from fedloom.report.page import render, write_page
    from fedloom.runs.config_file import load
    from fedloom.runs.configured import run_configured, run_directory
    from fedloom.runs.events import RunName
    from fedloom.runs.run_figures import fastest_round

    configuration = load(file, overrides or [])
    algorithm = configuration.only_method("run")
    configuration = configuration.of(algorithm)
    label = algorithm if configuration.labelled(algorithm) else str(parse(algorithm))
    name = RunName(label, configuration.seed)
    path = run_directory(configuration, algorithm, configuration.seed).path
    make_task = cache(configuration.task)
    with shown(1, configuration.rounds, quiet) as (watch, stopped):

        def watch_or_stop(event: Any) -> None:
            watch(event)
            if stopped():
                raise KeyboardInterrupt

        summary = run_configured(
            configuration, name, watch_or_stop, fresh=fresh, make_task=make_task
        )
    page = path / "report.html"
    if fresh or not page.exists():
        write_page(page, render(str(name), [summary], configuration.targets, this_command()))
    scores, costs = result_lines(summary)
    print(f"{name}: {scores}\n{costs}")
    if verbose:
        print(fastest_round(summary, make_task(configuration.seed)))
    print(f"model:  {path / 'model.safetensors'}\nreport: {page}")


def compare(
    file: File,
    overrides: Overrides = None,
    tune: Tuned = None,
    trials: Trials = None,
    fresh: Fresh = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods, in several settings and over several seeds, on the same data.

    FILE.toml is the configuration, KEY=VALUE changes one of its keys, such as seeds=[0,1,2] or
    rounds=50, and settings.KEY=[...] compares in several settings, such as
    settings.data.partition=[iid,dirichlet(0.1)]. Every method has the same clients, samples and
    initial models. [[methods]] gives a method settings of its own. --tune
    training.learning_rate=[0.01,0.1] first tunes each method on validation data, with the same
    number of trials; a parameter such as mu is tuned for the methods that have it. After an
    interruption, the same command continues; with more rounds=..., it lengthens the runs, finished
    or not.
    """
    from fedloom.cli.terminal import print_tables
    from fedloom.report.conclusions import conclusions
    from fedloom.study.comparison import Comparison
    from fedloom.study.cores import threads_each

    plan = tuned_plan(file, overrides, tune or [], trials, quiet)
    comparison = Comparison.of(plan, this_command()).side_by_side
    configuration = comparison.configuration
    runs = len(comparison.names)
    with shown(runs, comparison.rounds, quiet) as (watch, stopped):
        if (workers := configuration.runs_at_a_time) > 1:
            threads = threads_each(configuration, runs)
            watch.line(
                f"up to {workers} runs at a time, threads per run: {threads} (workers=1: one "
                "after another)"
            )
        failed = comparison.run(watch, fresh=fresh, stopped=stopped)
    sheets = comparison.result(failed).sheets
    print_tables(sheets)
    folder = configuration.folder
    print(f"figures: {folder / 'comparison.csv'}, .json, .md, .tex, {folder / 'differences.csv'}")
    width = get_terminal_size().columns
    print(
        *(fill(text, width) for text in conclusions(sheets)),
        f"look first at {folder / 'report.html'}",
        sep="\n",
    )
    require_finished(failed, runs)
