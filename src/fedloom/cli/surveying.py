"""`fedloom statistics`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.options import File, Overrides
from fedloom.errors import InvalidValue

Smallest = Annotated[
    int,
    typer.Option(
        "--smallest", help="Fewest rows of a client that a number tells of, 5 by default.", show_default=False
    ),
]
Bins = Annotated[int, typer.Option("--bins", help="Bins of a histogram, 32 by default.", show_default=False)]
Bounds = Annotated[
    list[str] | None,
    typer.Option("--bounds", metavar="COLUMN=LOW,HIGH", help="Bounds of a column, as age=0,120; may be repeated."),
]
Epsilon = Annotated[
    float | None, typer.Option("--epsilon", help="Add noise: all numbers cost a row that much privacy.")
]
Delta = Annotated[
    float, typer.Option("--delta", help="Probability of a larger loss of privacy, 1e-5 by default.", show_default=False)
]
Output = Annotated[
    list[Path] | None,
    typer.Option("--output", metavar="FILE", help="Write a page (.html) or numbers (.json); may be repeated."),
]


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
    survey: dict[str, Any] = {
        "smallest": smallest,
        "bins": bins,
        "bounds": dict(map(_bounds, bounds or [])),
        "epsilon": epsilon,
        "delta": delta,
    }
    task = configuration.task(configuration.seed)
    result = federated_statistics.statistics(task, seed=configuration.seed, **survey)
    console = Console()
    console.print(*statistics_tables(result, console.width))
    for path in output or []:
        result.save(path)
        print(f"written: {path}")


def _bounds(text: str) -> tuple[str, tuple[float, float]]:
    """Return a column's name and its bounds."""
    name, _, numbers = text.rpartition("=")
    try:
        low, high = map(float, numbers.split(","))
    except ValueError:
        raise InvalidValue(f"--bounds {text!r} is not COLUMN=LOW,HIGH, such as age=0,120") from None
    return name, (low, high)
