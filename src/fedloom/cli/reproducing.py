"""`fedloom paper reproduce`: list and run the papers' tables and figures."""

from __future__ import annotations

import sys
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import (
    Fresh,
    Places,
    Quiet,
    folders_of,
    option,
    require_finished,
    shown,
    this_command,
)
from fedloom.common.errors import InvalidValue, quoted

if TYPE_CHECKING:
    from fedloom.reviews.papers.plan import ReproducePlan
    from fedloom.study.jobs import Tasks

Which = Annotated[str | None, typer.Argument(metavar="[ID]", hidden=True)]
Changes = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", hidden=True)]
Rows = Annotated[
    list[str] | None, option(metavar="TEXT", help="Only these methods, such as FedAvg,FedDC.")
]
Columns = Annotated[
    list[str] | None, option(metavar="TEXT", help='Only these settings: "MNIST IID 15%".')
]


def reproduce(
    which: Which = None,
    changes: Changes = None,
    rows: Rows = None,
    columns: Columns = None,
    rounds: Annotated[
        int | None, option(help="Largest number of rounds; the results may be partial.")
    ] = None,
    seeds: Annotated[
        str | None, option(metavar="0,1,2", help="Seeds instead of the paper's runs.")
    ] = None,
    samples: Annotated[int | None, option(help="Number of samples of the data to use.")] = None,
    data: Places = None,
    workers: Annotated[
        int | None, option(help="Runs at a time, by default the number of cores.")
    ] = None,
    directory: Annotated[Path, option(help="Folder of results, runs/reproduce by default.")] = Path(
        "runs/reproduce"
    ),
    hour: Annotated[
        bool,
        option("--hour", help="Run the part of a paper that two cores check in about an hour."),
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Only print the estimated duration.")
    ] = False,
    fresh: Fresh = False,
    quiet: Quiet = False,
) -> None:
    """Run the papers' tables and figures: fedloom paper reproduce [ID] [KEY=VALUE]...

    Without ID, list them. A table's cells are run with the paper's protocol and shown beside the
    printed numbers. KEY=VALUE changes a key of the configuration. After an interruption, the same
    command continues; finished runs are never repeated.
    """
    from fedloom.reviews.papers.execute import require_data
    from fedloom.reviews.papers.library import exhibit, paper
    from fedloom.reviews.papers.plan import ReproduceOptions, plan

    if which is None:
        if hour:
            raise InvalidValue("--hour needs a paper, such as fedmr")
        _list(folders_of(data))
        return
    check = paper(which).hour if hour else None
    limits = {
        "rows": rows,
        "columns": columns,
        "rounds": rounds,
        "seeds": _numbers(seeds),
        "samples": samples,
    }
    given = {name: value for name, value in limits.items() if value not in (None, [])}
    options = ReproduceOptions(
        **{**(check.limits if check else {}), **given},
        folders=folders_of(data),
        changes=[*(changes or []), *([] if workers is None else [f"workers={workers}"])],
        directory=directory,
    )
    reproduction = plan(exhibit(check.exhibit if check else which), options)
    if check:
        print(f"shows {check.can}", f"does not show {check.cannot}", sep="\n", file=sys.stderr)
    if estimate:
        _print_estimate(reproduction)
    else:
        tasks = require_data(reproduction, fresh)
        _print_estimate(reproduction)
        _run(reproduction, tasks, fresh, quiet)


def _run(plan: ReproducePlan, tasks: Tasks, fresh: bool, quiet: bool) -> None:
    from rich.console import Console

    from fedloom.reviews.papers import execute
    from fedloom.reviews.papers.result_table import to_table
    from fedloom.study.pools import make_pool

    jobs = plan.waiting(fresh)
    rounds = {job.name: job.configuration.rounds for job in jobs}
    pool = make_pool(plan.configuration, len(plan.jobs), len(jobs), tasks)
    with closing(pool), shown(len(jobs), rounds, quiet) as (watch, stopped):
        failed = pool.run(jobs, watch, fresh, stopped)
    summaries = {job.name: job.summary() for job in plan.jobs if job.finished}
    table = execute.lines(plan, summaries, failed)
    Console().print(to_table(execute.title(plan), table, execute.notes(plan)))
    *others, first = execute.write(plan, table, summaries, this_command())
    print(*others, f"look first at {first}", sep="\n")
    require_finished(failed, len(plan.jobs))


def _print_estimate(plan: ReproducePlan) -> None:
    from rich.console import Console

    from fedloom.report.units import time_text
    from fedloom.reviews.papers.estimate import estimate
    from fedloom.study.cores import threads_each

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    busy = min(plan.configuration.runs_at_a_time, max(1, len(plan.jobs)))
    costs = estimate(plan, threads_each(plan.configuration, len(plan.jobs)))
    for setting, runs in costs.items() if len(costs) > 1 else ():
        console.print(
            f"{setting}: {_runs(len(runs))}, about {time_text(sum(run.seconds for run in runs))}"
        )
    waiting = [run for runs in costs.values() for run in runs]
    if not waiting:
        console.print(f"{plan.exhibit.id}: {_runs(len(plan.jobs))}, all finished before")
        return
    finished = len(plan.jobs) - len(waiting)
    skipped = f" ({finished} finished before)" if finished else ""
    seconds = sum(run.seconds for run in waiting) / busy
    steps = sum(run.steps for run in waiting)
    console.print(
        f"{plan.exhibit.id}: {len(plan.cells)} cells, {_runs(len(plan.jobs))}{skipped}, "
        f"{steps:,} local steps: "
        f"about {time_text(seconds)} on this machine, if its cores are otherwise idle"
        + (f", with {busy} workers" if busy > 1 else "")
    )
    if seconds > 600:
        console.print(
            "to reduce it: --rounds, --seeds, --samples, --rows or --columns; results are "
            "then labelled PARTIAL"
        )


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _list(folders: dict[str, str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from fedloom.reviews.papers.library import exhibits, titles
    from fedloom.reviews.papers.paper_data import FACTS, at_hand, data_of, family

    columns = (
        Column("Table or figure", no_wrap=True),
        "Shows",
        Column("Cells", justify="right"),
        "Data",
    )
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    missing: dict[str, None] = {}
    for version, group in groupby(
        exhibits().values(), lambda exhibit: exhibit.id.partition(".")[0]
    ):
        table.add_row(Text(version, style="bold"), Text(titles()[version], style="bold"))
        for exhibit in group:
            labels = []
            for name in dict.fromkeys(data_of(cell.setting.data) for cell in exhibit.cells):
                available = at_hand(name, folders.get(family(name)))
                labels.append(FACTS[name].label if available else f"({FACTS[name].label})")
                missing |= {} if available else {family(name): None}
            table.add_row(exhibit.id, exhibit.shows, str(len(exhibit.cells)), ", ".join(labels))
    console = Console()
    console.print(table)
    if missing:
        console.print(
            f"In brackets: data not found. Give --data NAME=FOLDER ({', '.join(missing)}), "
            "or set FEDLOOM_DATA to the folder of all data."
        )
    console.print(
        "fedloom paper reproduce ID --estimate prints the duration of one; docs/reproduce.md "
        "describes the protocols."
    )


def _numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise InvalidValue(
            f"--seeds must be whole numbers separated by commas, not {quoted(text)}"
        ) from None
