"""Cells of Arrow columns: their types, empty cells, numbers and categories.

Every cell of a CSV file is read as text. A column is numbers only if all its cells are, apart from
markers of empty cells. Cells such as 007 are codes, so their column stays text.
"""

import re
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.common.errors import DataError, quoted
from fedloom.data.formats.limits import reading

MARKERS = (
    "", "?", "-", ".", "#N/A", "#N/A N/A", "#NA", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!",
    "#NULL!", "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN", "-NaN", "-nan", "<NA>", "N/A", "n/a",
    "NA", "NULL", "null", "NaN", "nan", "None",
)  # fmt: skip
"""Empty cells in a column of numbers, as pandas and Excel write them. In text only "" is empty."""

_CODE = r"^[+-]?0\d"  # a leading zero
_LONG = r"^[+-]?\d{19,}$"  # more digits than float64 holds
_DECIMAL_COMMA = r"^[+-]?\d+(,\d+)?([eE][+-]?\d+)?$"
_THOUSANDS = r"^[+-]?\d{1,3},\d{3}$"
_LARGEST = float(np.finfo(np.float32).max)
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3\d{2,4})([ T].*)?")
_DAY = 86_400e6  # microseconds


def is_text(kind: Any) -> bool:
    """Return True for the type of a column of text or of categories."""
    import pyarrow as pa

    return kind in (pa.string(), pa.large_string()) or pa.types.is_dictionary(kind)


def is_pictures(kind: Any) -> bool:
    """Return True for the type of a column of packed pictures of Hugging Face's `datasets`."""
    import pyarrow as pa

    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def is_date(kind: Any) -> bool:
    """Return True for the type of a column of dates or times of a date."""
    import pyarrow as pa

    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def holds_dates(cells: Any) -> bool:
    """Return True for a column of dates, or of text in which every cell is written as a date."""
    if not is_text(cells.type):
        return is_date(cells.type)
    texts = [text for text in undictionary(cells).unique().to_pylist() if text]
    return bool(texts) and all(isinstance(t, str) and _DATE.fullmatch(t.strip()) for t in texts)


def days(cells: Any, title: str) -> npt.NDArray[np.float64]:
    """Return dates as days since 1970-01-01, times of a day as a fraction.

    Args:
        cells: Cells of `n` rows: dates, or their text.
        title: Name of the column in errors.

    Returns:
        `[n, 1]`, NaN for empty cells.

    Raises:
        DataError: A text is no date such as 2024-12-31.
    """
    import pyarrow as pa

    cells = undictionary(cells)
    if is_text(cells.type):
        cells = _marked(cells.cast(pa.string()))
    try:
        since = cells.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DataError(
            f"{title} has cells that are no dates: write all of them as 2024-12-31"
        ) from None
    values: npt.NDArray[np.float64] = since.cast(pa.float64()).to_numpy()[:, None] / _DAY
    return values


def first_empty(cells: Any) -> str:
    """Return the row of the first empty cell and the number of all, for an error; "" without
    any.
    """
    if not cells.null_count:
        return ""
    row = cells.is_null().index(True).as_py()
    return f"is empty in row {row}, and in {cells.null_count} in all"


def text_column(cells: Any) -> Any:
    """Return cells as text, in which only "" is empty."""
    return _without(cells, [""])


def number_column(cells: Any, title: str, decimal: str) -> Any:
    """Return cells of text as numbers or booleans.

    Args:
        cells: Cells of text.
        title: Name of the file and the column.
        decimal: Decimal mark; "" if it is to be detected.

    Returns:
        An Arrow column of int64, booleans or float64. Empty cells are null.

    Raises:
        DataError: A cell is no number.
    """
    import pyarrow as pa

    full = _marked(cells)
    for kind in (pa.int64(), pa.bool_(), pa.float64()):
        if (converted := _converted(full, kind, decimal)) is not None:
            return converted
    for row, cell in enumerate(full.to_pylist()):
        if cell is not None and _converted(pa.array([cell]), pa.float64(), ".") is None:
            raise DataError(
                f"{title} is text: {quoted(cell)} in row {row}, and the model was trained on "
                "numbers"
            )
    return cells


def inferred_column(cells: Any, decimal: str) -> Any:
    """Return cells of text as whole numbers, booleans, dates or floats if all are, else as text.

    Args:
        cells: Cells of text.
        decimal: Decimal mark; "" if it is to be detected.

    Returns:
        An Arrow column. Empty cells of numbers and dates are null.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    full = _marked(cells)
    if full.null_count == len(full):
        return pa.chunked_array([pa.nulls(len(full))])
    kinds = [pa.int64(), pa.bool_(), pa.date32(), pa.timestamp("ns"), pa.float64()]
    if pc.any(pc.match_substring_regex(full, _CODE)).as_py():
        kinds = []
    elif pc.any(pc.match_substring_regex(full, _LONG)).as_py():
        kinds.remove(pa.float64())
    for kind in kinds:
        if (converted := _converted(full, kind, decimal)) is not None:
            return converted
    return text_column(cells)


def _marked(cells: Any) -> Any:
    import pyarrow.compute as pc

    return _without(pc.utf8_trim_whitespace(cells), MARKERS)


def _without(cells: Any, empty: Collection[str]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    is_empty = pc.is_in(cells, value_set=pa.array(list(empty), pa.string()))
    return pc.if_else(is_empty, pa.scalar(None, pa.string()), cells)


def _converted(cells: Any, kind: Any, decimal: str) -> Any:
    """Return cells of a type, None if one is not of it. A comma in floats is the decimal mark if it
    cannot separate thousands.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return cells.cast(kind)
    except pa.ArrowInvalid:
        pass
    if kind != pa.float64() or decimal == ".":
        return None
    if not pc.all(pc.match_substring_regex(cells, _DECIMAL_COMMA)).as_py():
        return None
    with_comma = cells.filter(pc.match_substring(cells, ","))
    if not decimal and pc.all(pc.match_substring_regex(with_comma, _THOUSANDS)).as_py():
        return None
    return _converted(pc.replace_substring(cells, ",", "."), kind, ".")


def categories(cells: Any) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the distinct cells of a column as text, and the index of each row's cell.

    Args:
        cells: An Arrow column. Empty cells are the category "".

    Returns:
        The texts in the order of their first rows, and the index of each row's text, `[n]`.
    """
    import pyarrow as pa

    encoded = undictionary(cells).combine_chunks().dictionary_encode(null_encoding="encode")
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    texts = [_category(value) for value in encoded.dictionary.to_pylist()]
    return texts, encoded.indices.to_numpy().astype(np.int64)


def undictionary(cells: Any) -> Any:
    """Return the values of a dictionary column, other cells unchanged."""
    import pyarrow as pa

    return cells.cast(cells.type.value_type) if pa.types.is_dictionary(cells.type) else cells


def _category(value: object) -> str:
    """Return a cell as text: an empty one as "", and 1.0 as 1, since whole numbers beside empty
    cells are read as floats.
    """
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def one_hot(
    cells: Any, names: tuple[str, ...], other: bool = False
) -> tuple[npt.NDArray[np.float64], list[str]]:
    """Return 1 in the column of each cell's category, and the categories that are none of `names`.

    Args:
        cells: Cells of `n` rows.
        names: Categories.
        other: True for one more column, of all other categories; an empty cell is none of them.

    Returns:
        `[n, categories]`, and the other categories.
    """
    texts, index = categories(cells)
    places = {name: place for place, name in enumerate(names)}
    if other:
        places = {text: len(names) for text in texts if text} | places
    place = np.array([places.get(text, -1) for text in texts], np.int64)[index]
    block = (place[:, None] == np.arange(len(names) + other)).astype(np.float64)
    places = dict.fromkeys(names, 0)
    return block, [text for text in texts if text not in places]


def numbers(cells: Any, title: str) -> npt.NDArray[np.float64]:
    """Return the numbers of a column.

    Args:
        cells: Cells of `n` rows: numbers, booleans, or lists of numbers.
        title: Name of the column in errors.

    Returns:
        `[n, 1]`, or `[n, length]` of lists; NaN for empty cells.

    Raises:
        DataError: Cells are of another type, or not finite.
    """
    import pyarrow as pa

    kind = cells.type
    is_type = pa.types
    values: npt.NDArray[np.float64]
    if is_type.is_list(kind) or is_type.is_fixed_size_list(kind) or is_type.is_large_list(kind):
        try:
            values = np.array(cells.to_pylist(), dtype=np.float64).reshape(len(cells), -1)
        except (ValueError, TypeError):
            raise DataError(f"{title}: lists of different lengths, or not of numbers") from None
        if len(values) and not values.shape[1]:
            raise DataError(f"{title} has lists without a number: leave it out")
    elif is_type.is_null(kind) or is_type.is_boolean(kind) or is_number(kind):
        with reading(title, "no numbers"):
            values = cells.cast(pa.float64(), safe=False).to_numpy()[:, None]
    else:
        raise DataError(f"{title}: {kind} is neither a number nor text: leave it out")
    empty = np.asarray(cells.is_null())[:, None]
    if not np.isfinite(values[~(np.isnan(values) & empty)]).all():
        raise DataError(f"{title}: a NaN or infinity among the numbers")
    # models are float32, and the squares of larger numbers are infinite
    return np.clip(values, -_LARGEST, _LARGEST)


def is_number(kind: Any) -> bool:
    """Return True for a type of numbers."""
    import pyarrow as pa

    is_type = pa.types
    return bool(is_type.is_integer(kind) or is_type.is_floating(kind) or is_type.is_decimal(kind))
