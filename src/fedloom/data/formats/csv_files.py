"""CSV files as Arrow tables: their encoding, separator and decimal mark, and the type of each
column.

Every cell is read as text. A column is numbers only if all its cells are, apart from markers of
empty cells. Cells such as 007 are codes, so their column stays text.
"""

import csv as standard_csv
import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedloom.data.formats.limits import read_bytes, reading, require_columns, require_room
from fedloom.errors import DataError, quoted

TEXT_TABLES = (".csv", ".tsv", ".txt")
"""Endings of files that are read as CSV."""

MARKERS = (
    "", "?", "-", ".", "#N/A", "#N/A N/A", "#NA", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#NULL!",
    "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN", "-NaN", "-nan", "<NA>", "N/A", "n/a", "NA", "NULL", "null", "NaN",
    "nan", "None",
)  # fmt: skip
"""Empty cells in a column of numbers, as pandas and Excel write them. In text only "" is empty."""

_CODE = r"^[+-]?0\d"  # a leading zero
_LONG = r"^[+-]?\d{19,}$"  # more digits than float64 holds
_DECIMAL_COMMA = r"^[+-]?\d+(,\d+)?([eE][+-]?\d+)?$"
_THOUSANDS = r"^[+-]?\d{1,3},\d{3}$"
_BLOCK = 2**31 - 1  # the most that Arrow parses at a time: no quoted line break is at a border
_ROW_BYTES, _CELL_BYTES, _COLUMN_BYTES = 64, 16, 10_000


def read_text_table(path: Path) -> Any:
    """Read a CSV file as an Arrow table of text, each cell as it is in the file.

    Raises:
        DataError: The file is damaged, too large or neither UTF-8 nor UTF-16.
    """
    from pyarrow import csv, string

    with reading(path, "damaged csv"):
        text = _as_utf8(read_bytes(path), path)
        delimiter = _separator(text, path)
        header = _header(text, delimiter)
        require_columns(len(header), path)
        rows = text.count(b"\n")
        columns = 1 + text[: (text.find(b"\n") + 1) or None].count(delimiter.encode())
        cells = text.count(delimiter.encode()) + rows
        content = len(text) + _CELL_BYTES * cells
        require_room(rows * _ROW_BYTES + columns * _COLUMN_BYTES + content, path)
        # Arrow's thread pool can abort the process at its exit.
        return csv.read_csv(
            io.BytesIO(text),
            csv.ReadOptions(use_threads=False, block_size=min(_BLOCK, len(text) + 1)),
            csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            csv.ConvertOptions(
                column_types=dict.fromkeys(header, string()),
                strings_can_be_null=False,
            ),
        )


def _as_utf8(text: bytes, path: Path) -> bytes:
    """Return the text in UTF-8 without a byte order mark."""
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = text.decode("utf-16").encode()
    text = text.removeprefix(b"\xef\xbb\xbf")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        found = quoted(text[max(0, error.start - 10) : error.start + 10])
        raise DataError(
            f"{path}: line {line} is not UTF-8: {found}. Save the file as CSV UTF-8, or convert it: iconv -f latin1 -t utf-8"
        ) from None
    return text


def _separator(text: bytes, path: Path) -> str:
    """Return the separator that gives the header the most columns; a comma where none does."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    widths = {mark: len(_header(text, mark)) for mark in ",;\t"}
    return max(widths, key=lambda mark: widths[mark])


def _header(text: bytes, delimiter: str) -> list[str]:
    lines = io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", newline="")
    return next(standard_csv.reader(lines, delimiter=delimiter), [])


def typed(table: Any, source: str, text: Collection[str], numbers: Collection[str]) -> Any:
    """Return a table of text with the type of each column by its cells.

    Args:
        table: As `read_text_table` returns it.
        source: The file, for errors.
        text: Columns that stay text, such as those that were categories in training.
        numbers: Columns that must be numbers, such as those that were in training.

    Raises:
        DataError: A cell of one of `numbers` is no number.
    """
    for position, name in enumerate(table.column_names):
        cells = table.column(name)
        if name in text:
            cells = _without(cells, [""])
        elif name in numbers:
            cells = _required_numbers(cells, f"{source}: column {quoted(name)}")
        else:
            cells = _inferred(cells)
        table = table.set_column(position, name, cells)
    return table


def _without(cells: Any, empty: Collection[str]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    is_empty = pc.is_in(cells, value_set=pa.array(list(empty), pa.string()))
    return pc.if_else(is_empty, pa.scalar(None, pa.string()), cells)


def _inferred(cells: Any) -> Any:
    """Return cells as whole numbers, booleans, dates or floats if all are, else as text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    full = _without(pc.utf8_trim_whitespace(cells), MARKERS)
    if full.null_count == len(full):
        return pa.chunked_array([pa.nulls(len(full))])
    if not pc.any(pc.match_substring_regex(full, _CODE)).as_py():
        for kind in (pa.int64(), pa.bool_(), pa.date32(), pa.timestamp("ns")):
            if (converted := _converted(full, kind)) is not None:
                return converted
        if not pc.any(pc.match_substring_regex(full, _LONG)).as_py():
            converted = _floats(full)
            if converted is not None:
                return converted
    return _without(cells, [""])


def _floats(cells: Any) -> Any:
    """Return cells as floats, with a decimal comma if it cannot separate thousands; None for text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if (converted := _converted(cells, pa.float64())) is not None:
        return converted
    with_comma = cells.filter(pc.match_substring(cells, ","))
    is_decimal = pc.all(pc.match_substring_regex(cells, _DECIMAL_COMMA)).as_py()
    if not is_decimal or pc.all(pc.match_substring_regex(with_comma, _THOUSANDS)).as_py():
        return None
    return _converted(pc.replace_substring(cells, ",", "."), pa.float64())


def _required_numbers(cells: Any, title: str) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    full = _without(pc.utf8_trim_whitespace(cells), MARKERS)
    for kind in (pa.int64(), pa.bool_()):
        if (converted := _converted(full, kind)) is not None:
            return converted
    if (converted := _floats(full)) is not None:
        return converted
    for row, cell in enumerate(full.to_pylist()):
        if cell is not None and _converted(pa.array([cell]), pa.float64()) is None:
            raise DataError(
                f"{title} is text: {quoted(cell)} in row {row}, and the model was trained on numbers"
            )
    return cells


def _converted(cells: Any, kind: Any) -> Any:
    import pyarrow as pa

    try:
        return cells.cast(kind)
    except pa.ArrowInvalid:
        return None
