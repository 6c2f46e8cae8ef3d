"""`fedloom new`: a configuration for a table."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import option
from fedloom.common.errors import InvalidValue

Table = Annotated[str, typer.Argument(metavar="FILE", hidden=True)]
Target = Annotated[str, option(metavar="COLUMN", help="Column to learn; guessed by default.")]
Group = Annotated[
    str, option(metavar="COLUMN", help="Column that names the client of a row; guessed by default.")
]
To = Annotated[
    Path | None, typer.Option("--to", metavar="FILE.toml", help="File to write; NAME.toml here.")
]


def new(file: Table, target: Target = "", group: Group = "", to: To = None) -> None:
    """Write a commented configuration for a table, ready for fedloom run.

    FILE is a .csv or .parquet file, or a folder with one file per client. The comments name the
    target, the clients, columns that are left out, empty cells and the shares of the classes.
    """
    from fedloom.survey.table_draft import default_name, draft_configuration

    name = default_name(file)
    path = to or Path(f"{name}.toml")
    if path.exists():
        raise InvalidValue(f"{path} exists: remove it, or choose another name with --to")
    text = draft_configuration(file, name, target, group)
    path.write_text(text, encoding="utf-8")
    print(text)
    print(f"written: {path}\nnext: fedloom run {path}")
