"""`fedloom statistics`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.federation_files import run_app
from fedloom.cli.options import File, Overrides, option
from fedloom.errors import InvalidValue

Smallest = Annotated[int | None, option(help="Fewest rows of a client that a number tells of, 5 by default.")]
Bins = Annotated[int | None, option(help="Bins of a histogram, 32 by default.")]
Bounds = Annotated[list[str] | None, typer.Option(metavar="COLUMN=LOW,HIGH", help="Bounds of a column, as age=0,120.")]
Epsilon = Annotated[float | None, typer.Option(help="Add noise: all numbers cost a row that much privacy.")]
Delta = Annotated[float | None, option(help="Probability of a larger loss of privacy, 1e-5 by default.")]
Output = Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Write a page (.html) or numbers (.json).")]


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

    FILE.toml is the configuration, KEY=VALUE changes one of its keys; or it is the folder of a Flower app, whose sites are asked.
    Rows, means, deviations, categories and quantiles are computed where the data are, and only summed; what fewer than
    --smallest rows of a client say is left out.
    """
    from rich.console import Console

    from fedloom.cli.terminal import statistics_tables
    from fedloom.experiment import federated_statistics
    from fedloom.experiment.column_statistics import read_bounds
    from fedloom.experiment.configuration import load

    given = {"smallest": smallest, "bins": bins, "epsilon": epsilon, "delta": delta}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    limits = read_bounds(bounds or [], "--bounds")
    if file.is_dir():
        if output or overrides:
            raise InvalidValue(
                "--output and KEY=VALUE are of one machine: sites write into the app's output at the server"
            )
        run_app(file, settings | {"bounds": "; ".join(bounds or []), "only": "statistics"})
        return
    configuration = load(file, overrides or [])
    task = configuration.task(configuration.seed)
    result = federated_statistics.statistics(task, seed=configuration.seed, bounds=limits, **settings)
    console = Console()
    console.print(*statistics_tables(result, console.width))
    for path in output or []:
        result.save(path)
        print(f"written: {path}")
