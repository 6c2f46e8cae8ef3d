"""Identifiers and dates in a table, from which a model should not learn unasked."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.common.errors import DataError, quoted, shortened
from fedloom.data.columns import Columns
from fedloom.data.doubts import texts_among_numbers
from fedloom.data.formats.arrow_columns import categories, holds_dates, is_number, is_text, numbers

_FEW_ROWS = 20
_MOST_CATEGORIES = 0.5  # of the rows with a value
_WORDS = ("id", "ids", "identifier", "no", "nr", "number", "key", "index", "idx", "row", "mrn")
_SPARSEST = 2  # range of row numbers, of which some are not training rows, relative to their count


def require_features(table: Any, roles: Columns, rows: npt.NDArray[np.int64]) -> None:
    """Check that no input is an identifier or a date, unless the roles say so.

    Args:
        table: An Arrow table.
        roles: The roles of its columns.
        rows: The rows to train on.

    Raises:
        DataError: An input has a category for nearly every row, or is a date. The text has the
            setting to add.
    """
    inputs = {name: table.column(name) for name in roles.inputs if name not in roles.categorical}
    dates = [name for name, cells in inputs.items() if holds_dates(cells)]
    unique = [
        name
        for name, cells in inputs.items()
        if name not in dates and is_text(cells.type) and identifies_rows(cells.take(rows))
    ]
    if unique:
        raise DataError(
            f"{_columns(unique)} nearly as many categories as rows, such as names or numbers of "
            f"persons: add {roles.leave_out(unique)}, or name a column in categorical to learn "
            "from it"
        )
    if dates and roles.dates == "refuse":
        raise DataError(
            f"{_columns(dates)} dates: add {roles.ordinal} to learn from them as numbers of days, "
            f"or {roles.leave_out(dates)}"
        )
    if roles.missing == "mean":
        _require_values({name: cells.take(rows) for name, cells in inputs.items()}, roles)


def _require_values(inputs: Mapping[str, Any], roles: Columns) -> None:
    """Raise `DataError` for a column with too few numbers: their mean would reveal them."""
    for name, cells in inputs.items():
        count = len(cells) - cells.null_count
        if not is_text(cells.type) and 0 < count < min(roles.smallest, len(cells)):
            raise DataError(
                f"column {quoted(name)} has {count} values in {len(cells)} rows, and smallest is "
                f"{roles.smallest}: add {roles.leave_out([name])}"
            )


def identifies_rows(cells: Any) -> bool:
    """Return True if more than half of the cells with a value have different values.

    Numbers with a few texts among them are no identifiers.
    """
    texts, index = categories(cells)
    counts = np.bincount(index, minlength=len(texts))
    if texts_among_numbers(texts, counts):
        return False
    filled = [int(count) for text, count in zip(texts, counts, strict=True) if text]
    return sum(filled) >= _FEW_ROWS and len(filled) > _MOST_CATEGORIES * sum(filled)


def row_number_notices(table: Any, roles: Columns, rows: npt.NDArray[np.int64]) -> list[str]:
    """Return a notice if inputs are numbers of rows or persons, with the setting to add.

    They are not refused: such a column can be a feature, such as the time in days.

    Args:
        table: An Arrow table.
        roles: The roles of its columns.
        rows: The rows to train on.
    """
    found = [
        name
        for name in roles.inputs
        if name not in roles.categorical and numbers_rows(name, table.column(name).take(rows))
    ]
    if not found:
        return []
    return [
        f"{_columns(found)} another whole number in each row, such as numbers of rows or persons: "
        f"add {roles.leave_out(found)} unless a model should learn from it"
    ]


def numbers_rows(name: str, cells: Any) -> bool:
    """Return True if all cells with a value are different whole numbers that number the rows.

    The name of the column then says so, or the numbers have few gaps.

    Args:
        name: Name of the column.
        cells: Its cells.
    """
    present = cells.drop_null()
    if not is_number(cells.type) or not _FEW_ROWS <= len(present) == len(present.unique()):
        return False
    values = numbers(present, f"column {quoted(name)}")
    if (values % 1).any():
        return False
    return _names_numbers(name) or float(np.ptp(values)) < _SPARSEST * len(values)


def _names_numbers(name: str) -> bool:
    """Return True for names such as `patient_id`, `PatientID`, `id patient` or `row no.`."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    lower = [word.lower() for word in words]
    return bool(lower) and (lower[-1] in _WORDS or lower[0] == "id")


def _columns(names: list[str]) -> str:
    listed = shortened(", ".join(map(quoted, names)))
    return f"column {listed} has" if len(names) == 1 else f"columns {listed} have"
