"""Record of a reproduced table or figure, as `fedloom paper reproduce` writes it to
`cells.json`.
"""

import datetime
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.common.errors import InvalidValue
from fedloom.reviews.papers.library import exhibit
from fedloom.reviews.papers.measure import Measured
from fedloom.reviews.papers.result_table import CellResult
from fedloom.runs.directory import to_json
from fedloom.state.files import read_file


@dataclass(frozen=True)
class ExhibitRecord:
    """The cells of a table or figure that one command measured; `source` names the page that they
    were transcribed from, if they were.
    """

    exhibit: str
    command: str
    date: str
    environment: Mapping[str, Any]
    results: tuple[CellResult, ...]
    source: str = ""

    def to_json(self) -> str:
        """Return the contents of the record's file. Folders of this machine are left out of the
        command.
        """
        cells = []
        for line in (line for line in self.results if line.result is not None):
            figures = {
                name: value for name, value in vars(line.result).items() if value is not None
            }
            cells.append(
                {
                    "row": line.cell.row,
                    "column": line.cell.column,
                    **figures,
                    "left_out": line.left_out,
                }
            )
        words = shlex.split(self.command)
        anywhere = [
            re.sub(r"^(\w+=)?.*", r"\1FOLDER", word)
            if option in ("--data", "--directory")
            else word
            for option, word in zip(("", *words), words, strict=False)
        ]
        fields = {name: value for name, value in vars(self).items() if name != "results"}
        return to_json({**fields, "command": shlex.join(anywhere), "cells": cells})

    @classmethod
    def read(cls, path: Path) -> "ExhibitRecord":
        """Return the record in a file; raises `InvalidValue` for another file, or a cell that the
        table does not have.
        """
        try:
            table = json.loads(read_file(path))
            cells = {(cell.row, cell.column): cell for cell in exhibit(table["exhibit"]).cells}
            results = [
                CellResult(
                    cells[entry.pop("row"), entry.pop("column")],
                    left_out=tuple(entry.pop("left_out")),
                    result=Measured(**entry),
                )
                for entry in table.pop("cells")
            ]
            return cls(**table, results=tuple(results))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidValue(f"{path} is no record of a table or figure ({error})") from None


def today() -> str:
    """Return today's date, for a record."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
