"""`fedloom statistics`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.options import File, Overrides, option
from fedloom.errors import InvalidValue

Smallest = Annotated[int, option(help="Fewest rows of a client that a number tells of, 5 by default.")]
Bins = Annotated[int, option(help="Bins of a histogram, 32 by default.")]
Bounds = Annotated[list[str] | None, typer.Option(metavar="COLUMN=LOW,HIGH", help="Bounds of a column, as age=0,120.")]
Epsilon = Annotated[float | None, typer.Option(help="Add noise: all numbers cost a row that much privacy.")]
Delta = Annotated[float, option(help="Probability of a larger loss of privacy, 1e-5 by default.")]
Output = Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Write a page (.html) or numbers (.json).")]


def statistics(
    file: File,
    overrides: Overrides = None,
    smallest: Smallest = 5,
    bins: Bins = 32,
    bounds: Bounds = None,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    output: Output = None,
) -> None:
    """Show statistics of the clients' data, before training.

    FILE.toml is the configuration, KEY=VALUE changes one of its keys. Rows, means, deviations, categories and quantiles are
    computed where the data are, and only summed; what fewer than --smallest rows of a client say is left out.
    """
    from rich.console import Console

    from fedloom.cli.terminal import statistics_tables
    from fedloom.experiment import federated_statistics
    from fedloom.experiment.configuration import load

    configuration = load(file, overrides or [])
    limits = dict(map(_bounds, bounds or []))
    privacy: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "seed": configuration.seed}
    task = configuration.task(configuration.seed)
    result = federated_statistics.statistics(task, smallest=smallest, bins=bins, bounds=limits, **privacy)
    console = Console()
    console.print(*statistics_tables(result, console.width))
    for path in output or []:
        result.save(path)
        print(f"written: {path}")


def _bounds(text: str) -> tuple[str, tuple[float, float]]:
    name, _, numbers = text.rpartition("=")
    try:
        low, high = map(float, numbers.split(","))
    except ValueError:
        raise InvalidValue(f"--bounds {text!r} is not COLUMN=LOW,HIGH, such as age=0,120") from None
    return name, (low, high)
