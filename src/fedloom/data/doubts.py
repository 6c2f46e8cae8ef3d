"""Notices of columns of a table that may be read otherwise than they are meant."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedloom.common.errors import quoted, shortened
from fedloom.data.columns import Columns
from fedloom.data.formats.arrow_columns import categories, holds_dates, numbers

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_MARKED = re.compile(r"[$€£]? ?[+-]?\d[\d,.' ]* ?[%$€£]?")
_NEARLY = 0.9  # of the cells: text that is probably numbers
_FEW_ROWS = 20
_FEW_VALUES = 20
_FAR = 1e4


def doubtful_columns(table: Any, roles: Columns, rows: npt.NDArray[np.int64]) -> list[str]:
    """Return a notice for each input that is text but nearly numbers, or that has a number which
    outweighs all others, and one for categories that too few rows have.

    Notices are stored with a run, so they name rows and no values.

    Args:
        table: An Arrow table.
        roles: The roles of its columns.
        rows: The rows to train on.

    Returns:
        Notices, each a sentence with the name of the column.
    """
    notices = []
    rare: dict[str, int] = {}
    for name in roles.inputs:
        cells = table.column(name).take(rows)
        title = f"column {quoted(name)}"
        if roles.is_categorical(name, cells):
            texts, index = categories(cells)
            counts = np.bincount(index, minlength=len(texts))
            pairs = zip(texts, counts.tolist(), strict=True)
            few = sum(bool(text) and 0 < count < roles.smallest for text, count in pairs)
            rare |= {name: few} if few else {}
            if name not in roles.categorical:
                notices += _doubtful_text(texts, index, rows, title)
        elif not holds_dates(cells):
            notices += _outweighed(numbers(cells, title), rows, title)
    if rare:
        listed = ", ".join(f"{quoted(name)} ({count})" for name, count in rare.items())
        notices.append(
            f"categories that fewer than {roles.smallest} rows have are one input, other, of each "
            f"column: {shortened(listed)}"
        )
    return notices


def whole_floats(labels: Tensor, target: str) -> list[str]:
    """Return a notice if a target of floats holds few whole numbers, which may be classes.

    Args:
        labels: Target `[n]`.
        target: Name of its column.

    Returns:
        One notice or none.
    """
    values = labels.unique()
    if len(values) > _FEW_VALUES or bool((values % 1).any()):
        return []
    return [
        f"target {quoted(target)} holds {len(values)} whole numbers, stored as floats, and is "
        "learned as a "
        "regression: objective='classification' (of a file, table(kind=classification)) takes "
        "them as classes"
    ]


def _doubtful_text(
    texts: Sequence[str], index: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], title: str
) -> list[str]:
    counts = np.bincount(index, minlength=len(texts))
    others = texts_among_numbers(texts, counts)
    if not others:
        return []
    first = [int(rows[np.argmax(index == texts.index(text))]) for text in others]
    return [
        f"{title} is {len([*filter(None, texts)])} categories of text, though most cells are "
        f"numbers, because of {len(others)} other texts, first in row "
        f"{shortened(', '.join(map(str, first)))}: write these as numbers or leave "
        "them empty"
    ]


def texts_among_numbers(texts: Sequence[str], counts: npt.NDArray[np.int64]) -> list[str]:
    """Return the texts that are no numbers in a column of which most cells are; else none.

    Args:
        texts: Distinct cells.
        counts: Rows of each.

    Returns:
        Texts such as `n/a` or `$ 5`; empty without doubt.
    """
    filled = {text: int(count) for text, count in zip(texts, counts, strict=True) if text}
    total = sum(filled.values())
    numeric = [text for text in filled if _NUMBER.fullmatch(text.strip())]
    others = [text for text in filled if text not in numeric]
    marked = [text for text in others if _MARKED.fullmatch(text.strip())]
    like_numbers = sum(filled[text] for text in (*numeric, *marked))
    is_code = any(text.lstrip("+-").startswith("0") and text[1:2].isdigit() for text in numeric)
    is_number = not is_code and len(filled) > 2 and like_numbers >= _NEARLY * total
    return others if is_number else []


def _outweighed(
    values: npt.NDArray[np.float64], rows: npt.NDArray[np.int64], title: str
) -> list[str]:
    """Return a notice if one number in a column holds nearly all of its variance."""
    present = ~np.isnan(values[:, 0])
    column = values[present, 0]
    if values.shape[1] > 1 or len(column) < _FEW_ROWS:
        return []
    largest = int(np.abs(column - np.median(column)).argmax())
    rest = np.delete(column, largest)
    spread = float(rest.std())
    if not spread or abs(column[largest] - rest.mean()) < _FAR * spread:
        return []
    return [
        f"{title} holds a number in row {rows[present][largest]} that is {_FAR:,.0f} deviations "
        "or more from all others, so that these become "
        "nearly equal inputs: correct it or leave its row out"
    ]
