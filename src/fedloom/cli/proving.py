"""`fedloom paper bundle` and `fedloom paper replay`: results that others can check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import Folder, Places, Quiet, RunsFailed, folders_of, option, shown
from fedloom.common.errors import InvalidValue

if TYPE_CHECKING:
    from fedloom.reviews.evidence.replay import Replay

BundleFile = Annotated[Path, typer.Argument(metavar="FILE", hidden=True)]
Trust = Annotated[
    bool, typer.Option("--trust-code", help="Run the code in the bundle instead of showing it.")
]


def bundle(
    folder: Folder,
    to: Annotated[Path | None, option(help="The file, by default DIR.zip.")] = None,
) -> None:
    """Put runs into one file for fedloom paper replay, which runs them again and compares.

    DIR contains a run, a comparison or a reproduced table, such as runs/digits or
    runs/reproduce/fedumf.table-a2. The file has configurations, figures, final models and your own
    modules; of data only digests.
    """
    from fedloom.report.units import byte_text
    from fedloom.reviews.evidence.bundle import write_bundle

    path = to or Path(f"{folder.resolve().name}.zip")
    bundled = write_bundle(folder, path)
    print(
        f"{path}: {len(bundled.runs)} run{'s' * (len(bundled.runs) > 1)}, "
        f"{byte_text(path.stat().st_size)}"
    )
    if bundled.code:
        print(f"your own code in it: {', '.join(bundled.code)}")
    print(f"to check it: fedloom paper replay {path}")


def replay(
    file: BundleFile,
    data: Places = None,
    directory: Annotated[
        Path | None, option(help="Folder of the runs, runs/replay/NAME by default.")
    ] = None,
    trust_code: Trust = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Only print the plan and its duration.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run a bundle again, and compare the results cell by cell.

    FILE is the output of fedloom paper bundle. Data are read from your folders (--data, or
    FEDLOOM_DATA); nothing is downloaded. The exit code is 1 if a cell differs. After an
    interruption, the same command continues.
    """
    import os
    import sys
    from contextlib import nullcontext

    from fedloom.common.plugins import refused_code
    from fedloom.reviews.evidence.bundle import unpack
    from fedloom.reviews.evidence.replay import Replay
    from fedloom.runs.directory import readable

    folder = directory or Path("runs/replay") / file.stem
    bundled = unpack(file, folder / "bundle")
    if bundled.code and not trust_code:
        for name in bundled.code:
            lines = (
                (folder / "bundle" / name)
                .read_text(encoding="utf-8", errors="replace")
                .splitlines()
            )
            print(
                f"--- {name}",
                *("".join(filter(str.isprintable, line.expandtabs())) for line in lines),
                sep="\n",
            )
        raise InvalidValue(
            f"{file} contains code ({', '.join(bundled.code)}): read it, then add --trust-code"
        )
    if trust_code:
        sys.path[:0] = [str((folder / "bundle" / "code").resolve()), os.getcwd()]
    with nullcontext() if trust_code else refused_code(), readable(file):
        replayed = Replay(bundled, folder, folders_of(data))
        print(*replayed.described(), sep="\n", flush=True)
        if not estimate:
            _run_again(replayed, quiet)


def _run_again(replayed: Replay, quiet: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fedloom.reviews.evidence.answers import ANSWERS
    from fedloom.study.jobs import Tasks, attempt

    tasks = Tasks()
    rounds = {job.name: job.configuration.rounds for job in replayed.jobs}
    with shown(len(replayed.jobs), rounds, quiet) as (watch, stopped):
        for number, job in enumerate(replayed.jobs):
            if differing := replayed.differing(number, tasks.of(job.configuration, job.name.seed)):
                watch.line(f"{job.name}: another {' and '.join(differing)} than the bundle's")
            if reason := attempt(job, watch, False, tasks):
                raise RunsFailed(f"{job.name}: {reason}")
            if stopped():
                raise KeyboardInterrupt
    table = Table(
        "Setting", "Method", "Seeds", "Bundle", "Here", "Answer", box=None, padding=(0, 2, 0, 0)
    )
    cells = replayed.cells()
    for cell in cells:
        figures = (f"{cell.bundled:.4f}", f"{cell.here:.4f}", cell.answer)
        table.add_row(*map(Text, (cell.setting, cell.algorithm, str(cell.seeds), *figures)))
    Console(highlight=False).print(table)
    for cell in (cell for cell in cells if cell.detail):
        print(f"{', '.join(filter(None, (cell.algorithm, cell.setting)))}: {cell.detail}")
    if any(cell.answer == ANSWERS[-1] for cell in cells):
        raise typer.Exit(1)
