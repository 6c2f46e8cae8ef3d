"""`fedloom report`, `fedloom watch` and `fedloom statistics`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.federation_files import run_app
from fedloom.cli.options import File, Folder, Overrides, Quiet, option
from fedloom.common.errors import InvalidValue

if TYPE_CHECKING:
    from fedloom.runs.configuration import Configuration

Port = Annotated[
    int, option(help="Port of the page, 8600 by default; 0 for any free port.", min=0, max=65535)
]
Images = Annotated[
    str,
    typer.Option(metavar="FORMATS", help="Also write every figure as png, svg or pdf: png,svg."),
]
Plain = Annotated[
    bool, typer.Option("--no-captions", help="Images without title and caption, as for a paper.")
]
Recorder = Annotated[
    str,
    option(
        metavar="LANDSCAPE", help="The loss around final models: landscape, or landscape(grid=31)."
    ),
]
Smallest = Annotated[
    int | None, option(help="Smallest number of a client's rows in a value, 5 by default.")
]
Bins = Annotated[int | None, option(help="Bins of a histogram, 32 by default.")]
Bounds = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN=LOW,HIGH", help="Bounds of a column, such as age=0,120."),
]
Epsilon = Annotated[
    float | None,
    typer.Option(help="Privacy loss of a row by all numbers together; adds noise to them."),
]
Delta = Annotated[
    float | None, option(help="Probability of a larger loss of privacy, 1e-5 by default.")
]
Output = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Write a page (.html) or numbers (.json).")
]


def report(
    folder: Folder,
    images: Images = "",
    no_captions: Plain = False,
    record: Recorder = "",
    quiet: Quiet = False,
) -> None:
    """Write the report of a run or a comparison again, and its figures as images.

    DIR contains a run or a comparison, such as runs/digits. Nothing is trained: the report uses
    only recorded values.
    """
    from rich.console import Console

    from fedloom.report.image_files import require_images, write_images
    from fedloom.runs.final_landscape import landscape_recorder
    from fedloom.study.comparison_result import read_comparison
    from fedloom.study.stored_runs import add_landscapes

    formats = [name.strip() for name in images.split(",") if name.strip()]
    if formats:
        require_images(formats)
    recorder = landscape_recorder(record) if record else None
    result = read_comparison(folder)
    if recorder is not None:
        console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        add_landscapes(result.runs, recorder, console.print)
        result = read_comparison(folder)
    for page in result.rewrite_reports():
        print(f"report: {page}")
    if formats:
        by = result.sheets[0].criterion
        shown = [run.labelled for run in result.with_trajectories()]
        files = write_images(folder / "images", shown, formats, by, captions=not no_captions)
        print(f"images: {folder / 'images'} ({len(files)} files)")


def watch(folder: Folder, port: Port = 8600) -> None:
    """Show runs in the browser while they train.

    DIR contains runs, such as runs/digits or the whole folder runs. The page updates itself; only
    this machine can open it. Ctrl-C ends it.
    """
    from fedloom.study.watch.serve import Server

    if not folder.is_dir():
        raise InvalidValue(
            f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}: give a "
            "folder of runs"
        )
    server = Server(folder, port)
    print(f"{folder}: {server.url}", flush=True)
    with server:
        server.serve_forever()


def statistics(
    file: File,
    overrides: Overrides = None,
    smallest: Smallest = None,
    bins: Bins = None,
    bounds: Bounds = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    output: Output = None,
) -> None:
    """Show statistics of the clients' data, before training.

    FILE.toml is the configuration, and KEY=VALUE changes one of its keys. It may also be the folder
    of a Flower app: then the statistics are of its sites. Rows, means, deviations, categories and
    quantiles are computed where the data are, and only sums are sent. Values of fewer than
    --smallest rows of a client are left out.
    """
    from rich.console import Console

    from fedloom.cli.terminal import statistics_tables
    from fedloom.runs.config_file import load
    from fedloom.survey import federated_statistics
    from fedloom.survey.column_statistics import read_bounds

    options = {"smallest": smallest, "bins": bins, "epsilon": epsilon, "delta": delta}
    settings: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    limits = read_bounds(bounds or [], "--bounds")
    if file.is_dir():
        if output or overrides:
            raise InvalidValue(
                "--output and KEY=VALUE are for one machine: with sites, see the server's "
                "output folder"
            )
        run_app(file, settings | {"bounds": "; ".join(bounds or []), "only": "statistics"})
        return
    configuration = _of_all_rows(load(file, overrides or []))
    task = configuration.task(configuration.seed)
    result = federated_statistics.statistics(
        task, seed=configuration.seed, bounds=limits, **settings
    )
    console = Console()
    console.print(*statistics_tables(result, console.width))
    for path in output or []:
        result.save(path)
        print(f"written: {path}")


def _of_all_rows(configuration: Configuration) -> Configuration:
    """Return the configuration with a table that keeps empty cells and rare categories."""
    from fedloom.common.expression import Call
    from fedloom.data.dataset import datasets

    entry, options = datasets.read(configuration.data.name)
    if entry.name != "table":
        return configuration
    expression = Call("table", named={**options, "missing": "mean", "smallest": 1})
    data = replace(configuration.data, name=str(expression))
    return replace(configuration, data=data)
