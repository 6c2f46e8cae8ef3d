"""CSV files as Arrow tables: their encoding, separator and decimal mark."""

import codecs
import csv as standard_csv
import io
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedloom.common.errors import DataError, InvalidValue, quoted
from fedloom.data.formats.arrow_columns import inferred_column, number_column, text_column
from fedloom.data.formats.limits import read_bytes, reading, require_columns, require_room

TEXT_TABLES = (".csv", ".tsv", ".txt")
"""Endings of files that are read as CSV."""

_BLOCK = 2**31 - 1  # the most that Arrow parses at a time: no quoted line break is at a border
_ROW_BYTES = 64
_CELL_BYTES = 16
_COLUMN_BYTES = 10_000


@dataclass(frozen=True)
class CsvOptions:
    """Types of columns and the format of a CSV file; an empty setting is detected.

    Attributes:
        text: Columns that stay text, such as those that were categories in training.
        numbers: Columns that must be numbers, such as those that were in training.
        separator: Character between cells.
        decimal: Decimal mark of numbers.
        encoding: Encoding of the text, such as `latin-1`.
    """

    text: Collection[str] = ()
    numbers: Collection[str] = ()
    separator: str = ""
    decimal: Literal["", ".", ","] = ""
    encoding: str = ""

    def __post_init__(self) -> None:
        if len(self.separator.encode()) > 1 or self.separator in ('"', "\r", "\n"):
            raise InvalidValue(f"separator must be one character, not {quoted(self.separator)}")
        try:
            codecs.lookup(self.encoding or "utf-8")
        except LookupError:
            example = "such as 'utf-8' or 'latin-1'"
            raise InvalidValue(
                f"encoding must be a text encoding, {example}, not {quoted(self.encoding)}"
            ) from None


def read_text_table(path: Path, options: CsvOptions) -> Any:
    """Read a CSV file as an Arrow table of text, without converting cells.

    Args:
        path: The file.
        options: Its format.

    Returns:
        An Arrow table of text. Empty cells are "".

    Raises:
        DataError: The file is damaged, too large or not in its encoding (by default UTF-8 or
            UTF-16).
    """
    from pyarrow import csv, string

    with reading(path, "damaged csv"):
        text = _as_utf8(read_bytes(path), path, options.encoding)
        delimiter = options.separator or _separator(text, path)
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


def typed(table: Any, source: str, options: CsvOptions) -> Any:
    """Return a table of text with the type of each column.

    Args:
        table: As `read_text_table` returns it.
        source: The file, for errors.
        options: Types of some columns. The types of the others follow from their cells.

    Returns:
        An Arrow table with the same columns.

    Raises:
        DataError: A cell of a column of numbers is no number.
    """
    for position, name in enumerate(table.column_names):
        cells = table.column(name)
        if name in options.text:
            cells = text_column(cells)
        elif name in options.numbers:
            cells = number_column(cells, f"{source}: column {quoted(name)}", options.decimal)
        else:
            cells = inferred_column(cells, options.decimal)
        table = table.set_column(position, name, cells)
    return table


def _as_utf8(text: bytes, path: Path, encoding: str) -> bytes:
    """Return the text in UTF-8 without a byte order mark."""
    if not encoding and text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    try:
        decoded = text.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        if encoding == "utf-16":
            raise
        line = text.count(b"\n", 0, error.start) + 1
        found = quoted(text[max(0, error.start - 10) : error.start + 10])
        remedy = "Save the file as CSV UTF-8, or convert it: iconv -f latin1 -t utf-8"
        raise DataError(
            f"{path}: line {line} is not {encoding or 'UTF-8'}: {found}. {remedy}"
        ) from None
    text = decoded.encode() if encoding else text
    return text.removeprefix(b"\xef\xbb\xbf")


def _separator(text: bytes, path: Path) -> str:
    """Return the separator that gives the header the most columns; a comma where none does."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    widths = {mark: len(_header(text, mark)) for mark in ",;\t"}
    return max(widths, key=lambda mark: widths[mark])


def _header(text: bytes, delimiter: str) -> list[str]:
    lines = io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", newline="")
    return next(standard_csv.reader(lines, delimiter=delimiter), [])
