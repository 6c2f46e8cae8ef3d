"""`fedloom reproduce`: the papers' tables and figures, listed and run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import Fresh, Quiet, patient, require_finished, shown, this_command
from fedloom.errors import InvalidValue, quoted

if TYPE_CHECKING:
    from fedloom.experiment.configuration import Configuration
    from fedloom.papers.plan import ReproducePlan

Which = Annotated[str | None, typer.Argument(metavar="[ID]", hidden=True)]
Changes = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", hidden=True)]
Texts = list[str] | None


def reproduce(
    which: Which = None,
    changes: Changes = None,
    rows: Annotated[
        Texts, typer.Option("--rows", metavar="TEXT", help="Only these methods, such as FedAvg,FedDC.")
    ] = None,
    columns: Annotated[
        Texts, typer.Option("--columns", metavar="TEXT", help='Only these settings, such as "MNIST IID 15%".')
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="At most so many rounds: partial results.")] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="0,1,2", help="Seeds instead of the paper's runs.")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Only so many of the data's samples.")] = None,
    data: Annotated[
        Texts, typer.Option("--data", metavar="NAME=FOLDER", help="Where a data set lies, such as mnist=data/MNIST.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Runs at a time: as many as there are cores by default.")
    ] = None,
    directory: Annotated[
        Path,
        typer.Option("--directory", help="Where runs and results go: runs/reproduce by default.", show_default=False),
    ] = Path("runs/reproduce"),
    hour: Annotated[
        bool, typer.Option("--hour", help="Of fedmr, fedumf or fedala what two cores check in about an hour.")
    ] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say how long it would take, and stop.")] = False,
    fresh: Fresh = False,
    quiet: Quiet = False,
) -> None:
    """Run the papers' tables and figures: fedloom reproduce [ID] [KEY=VALUE]...

    Without ID, list them. A table's cells are run with the paper's protocol and shown beside what the paper prints. KEY=VALUE
    changes a key of the configuration. The same command goes on after an interruption; finished runs are never repeated.
    """
    from fedloom.experiment.cores import runs_side_by_side
    from fedloom.papers.execute import require_files
    from fedloom.papers.paper_file import exhibit, hour_of
    from fedloom.papers.plan import ReproduceOptions, plan

    if which is None:
        if hour:
            raise InvalidValue("--hour needs a paper: fedmr, fedumf or fedala")
        _list(_folders(data))
        return
    part: Mapping[str, Any] = hour_of(which) if hour else {"exhibit": which}
    if workers is not None and workers < 1:
        raise InvalidValue(f"--workers must be at least 1, not {workers}")
    options = ReproduceOptions(
        rows=tuple(rows or part.get("rows", ())),
        columns=tuple(columns or part.get("columns", ())),
        rounds=part.get("rounds") if rounds is None else rounds,
        seeds=part.get("seeds") if seeds is None else _numbers(seeds),
        samples=part.get("samples") if samples is None else samples,
        folders=_folders(data),
        changes=tuple(changes or ()),
        directory=directory,
    )
    wanted = plan(exhibit(part["exhibit"]), options)
    if hour:
        print(f"shows {part['can']}", f"does not show {part['cannot']}", sep="\n", file=sys.stderr)
    if not estimate:
        require_files(wanted, fresh)
    configuration = next(iter(wanted.configurations.values()))
    configuration = replace(configuration, workers=workers or configuration.workers)
    configuration = replace(configuration, workers=runs_side_by_side(configuration, len(wanted.jobs)))
    _print_estimate(wanted, configuration, explained=estimate)
    if not estimate:
        _run(wanted, configuration, fresh, quiet, this_command())


def _run(wanted: ReproducePlan, configuration: Configuration, fresh: bool, quiet: bool, command: str) -> None:
    from rich.console import Console

    from fedloom.papers import execute
    from fedloom.papers.result_table import to_table

    tasks = execute.require_data(wanted, fresh)
    rounds = {job.name: job.configuration.rounds for job in execute.waiting(wanted, fresh)}
    with shown(len(rounds), rounds, quiet) as watch, patient(watch) as stopped:
        failed = execute.execute(wanted, configuration, watch, tasks, fresh=fresh, stopped=stopped)
    table = execute.lines(wanted, failed)
    Console().print(to_table(execute.title(wanted), table, execute.notes(wanted)))
    for place in execute.write(wanted, table, command):
        print(place)
    require_finished(failed, len(wanted.jobs))


def _print_estimate(wanted: ReproducePlan, configuration: Configuration, explained: bool) -> None:
    """The estimate, on stderr, setting by setting where there are a few; what it rests on where `explained`."""
    from rich.console import Console

    from fedloom.experiment.cores import threads_each
    from fedloom.papers.estimate import estimate
    from fedloom.report.units import time_text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    busy = min(configuration.runs_at_a_time, max(1, len(wanted.jobs)))
    threads = threads_each(configuration, len(wanted.jobs))
    found = estimate(wanted, threads)
    left = [one for one in found if one.seconds > 0]
    for one in left if len(left) > 1 else []:
        console.print(f"{one.setting}: {_runs(one.runs - one.finished)}, about {time_text(one.seconds)}")
    finished, runs = sum(one.finished for one in found), sum(one.runs for one in found)
    seconds, steps = sum(one.seconds for one in left) / busy, sum(one.steps for one in left)
    done = f" ({finished} finished before)" if finished else ""
    if not left:
        console.print(f"{wanted.exhibit.id}: {_runs(runs)}, all finished before" if runs else "nothing to run")
        return
    console.print(
        f"{wanted.exhibit.id}: {len(wanted.cells)} cells, {_runs(runs)}{done}, {steps:,} local steps: "
        f"about {time_text(seconds)} on this machine" + (f" with {busy} workers" if busy > 1 else "")
    )
    if explained:
        console.print(
            f"Assumed: local steps take as long as a few of FedAvg's just did here, in engine rows with {threads} "
            f"thread{'s' * (threads > 1)}, times the passes over the data that a method makes; nothing else keeps the cores busy."
        )
    if seconds > 600:
        console.print("less with --rounds, --seeds, --samples, --rows or --columns; results are then labelled PARTIAL")


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _list(folders: dict[str, str]) -> None:
    """Every table and figure: what it shows, its cells and the data it needs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fedloom.papers.paper_data import at_hand, data_of, facts, family
    from fedloom.papers.paper_file import exhibits, titles

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title, justify in (("Table or figure", "left"), ("Shows", "left"), ("Cells", "right"), ("Data", "left")):
        table.add_column(title, justify=justify, no_wrap=title == "Table or figure")  # type: ignore[arg-type]
    missing: dict[str, None] = {}
    for paper, full in titles().items():
        table.add_row(Text(paper, style="bold"), Text(full, style="bold"))
        for one in exhibits().values():
            if one.id.partition(".")[0] != paper:
                continue
            names = dict.fromkeys(data_of(cell.setting.data) for cell in one.cells)
            words = []
            for name in names:
                here = at_hand(name, folders.get(family(name)))
                words.append(facts()[name].label if here else f"({facts()[name].label})")
                if not here:
                    missing[family(name)] = None
            table.add_row(one.id, one.shows, str(len(one.cells)), ", ".join(words))
    console = Console()
    console.print(table)
    if missing:
        wanted = ", ".join(missing)
        console.print(
            f"In brackets: not at hand. Give --data NAME=FOLDER ({wanted}), or set FEDLOOM_DATA to the folder of all data."
        )
    console.print("fedloom reproduce ID --estimate says how long one takes; docs/reproduce.md what the protocols are.")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InvalidValue(f"--seeds must be whole numbers with commas between them, not {quoted(text)}") from None


def _folders(texts: Texts) -> dict[str, str]:
    """`--data mnist=FOLDER` by name, as absolute paths, so that runs are found again from anywhere."""
    found = {}
    for text in texts or ():
        name, equals, folder = text.partition("=")
        if not equals or not folder:
            raise InvalidValue(f"--data {quoted(text)} is not NAME=FOLDER, such as mnist=data/MNIST")
        found[name] = str(Path(folder).expanduser().resolve())
    return found
