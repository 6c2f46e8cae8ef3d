"""Columns of tables as a model's inputs: their order, the mean and deviation of numbers, the
categories of text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.formats.limits import reading, require_room
from fedloom.errors import DataError, quoted, shortened, suggestion

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_MARKED = re.compile(r"[$€£]? ?[+-]?\d[\d,.' ]* ?[%$€£]?")
_NEARLY = 0.9  # of the cells: text that is probably numbers
_FEW_ROWS = 20
_FAR = 1e4
_LARGEST = float(np.finfo(np.float32).max)

Missing = Literal["refuse", "mean", "drop"]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of features, `[features]` float64 each, leaving out
    empty cells.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "Moments":
        """Return the moments of rows `[n, features]`, in which NaN is an empty cell."""
        values = values.double()
        present = ~values.isnan()
        count = present.sum(0).double()
        mean = values.nansum(0) / count.clamp_min(1)
        return cls(count, mean, (values - mean).nan_to_num(0).square().sum(0))

    @property
    def deviation(self) -> Tensor:
        """The standard deviation (over n), 1 for a feature that never varies."""
        deviation = (self.squares / self.count.clamp_min(1)).sqrt()
        return torch.where(deviation > 1e-9 * self.mean.abs().clamp_min(1e-300), deviation, 1)


@dataclass(frozen=True)
class TableColumn:
    """An input column: categories that become columns of 0 and 1, or numbers, `width` of them in a
    cell.

    Numbers have a mean, which replaces empty cells, and a standard deviation each, none of them
    before `fitted`.
    """

    name: str
    categories: tuple[str, ...] | None = None
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    width: int = 1

    @property
    def features(self) -> int:
        """The number of a model's inputs that the column becomes."""
        return self.width if self.categories is None else len(self.categories)


@dataclass(frozen=True)
class Columns:
    """The roles of a table's columns and the treatment of empty cells; see the data set `table`."""

    target: str = ""
    group: str | Sequence[str] = ()
    inputs: Sequence[str] = ()
    categorical: Sequence[str] = ()
    kind: Literal["auto", "classification", "regression"] = "auto"
    missing: Missing = "refuse"
    standardise: bool = True
    has_options: bool = True  # False for a table in memory, which `make_task` reads without options

    @property
    def groups(self) -> list[str]:
        """The columns of groups as a list."""
        return [self.group] if isinstance(self.group, str) and self.group else list(self.group)


@dataclass(frozen=True)
class TableInputs:
    """Rows of a table as float inputs `[n, features]`, of its columns in this order; see the data
    set `table`.
    """

    columns: tuple[TableColumn, ...]
    missing: Missing = "refuse"
    standardise: bool = True
    kind: Literal["table"] = "table"

    @classmethod
    def of(
        cls, table: Any, roles: Columns, source: str, rows: npt.NDArray[np.int64]
    ) -> "TableInputs":
        """Return the encoding of an Arrow table's inputs, with the categories of some `rows`;
        `fitted` adds the numbers.
        """
        columns = []
        for name in roles.inputs:
            cells = table.column(name)
            if name in roles.categorical or is_text(cells.type):
                texts, index = categories(cells)
                present = np.unique(index[rows]).tolist()
                columns.append(TableColumn(name, tuple(sorted(texts[k] for k in present))))
            else:
                numbers = _numbers(
                    cells.drop_null().slice(0, 1), f"{source}: column {quoted(name)}"
                )
                columns.append(TableColumn(name, width=numbers.shape[1]))
        return cls(tuple(columns), roles.missing, roles.standardise)

    @property
    def features(self) -> int:
        """The number of inputs of a model."""
        return sum(column.features for column in self.columns)

    @property
    def is_fitted(self) -> bool:
        """True if every column of numbers has a mean and a deviation."""
        return all(column.mean for column in self.columns if column.categories is None)

    def encode(self, table: Any, source: str) -> tuple[Tensor, list[str]]:
        """Return inputs `[n, features]` float64, numbers as they are and NaN in empty cells, and
        notices in a line each.

        A category that is none of the column's becomes all 0. Raises `DataError` for a column that
        is missing or of another type, and for an empty cell unless `missing` is `mean`.
        """
        blocks: list[npt.NDArray[np.float64]] = []
        notices: list[str] = []
        widest = max(self.columns, key=lambda column: column.features)
        require_room(
            8 * self.features * len(table),
            f"{source}: {widest.features} inputs of {quoted(widest.name)}",
        )
        # Arrow looks for a name among all
        by_name = dict(zip(table.column_names, table.columns, strict=True))
        for column in self.columns:
            if column.name not in by_name:
                near = suggestion(column.name, by_name)
                raise DataError(
                    f"{source}: no column {quoted(column.name)}, which the model was trained on{near}"
                )
            cells, title = by_name[column.name], f"{source}: column {quoted(column.name)}"
            if column.categories is None:
                if is_text(cells.type):
                    raise DataError(f"{title} is text, and the model was trained on numbers")
                block = _numbers(cells, title)
                if block.shape[1] != column.width:
                    raise DataError(
                        f"{title} has lists of {block.shape[1]} numbers, not of {column.width}"
                    )
            else:
                block, unknown = _one_hot(cells, column.categories)
                if unknown:
                    listed = shortened(", ".join(map(quoted, unknown)))
                    notices.append(
                        f"{title} has categories that the model was not trained on, taken for none: {listed}"
                    )
            if self.missing != "mean" and cells.null_count:
                row = cells.is_null().index(True).as_py()
                raise DataError(
                    f"{title} is empty in row {row}, and in {cells.null_count} in all: fill it"
                )
            blocks.append(block)
        return torch.from_numpy(np.concatenate(blocks, axis=1)), notices

    def fitted(self, moments: Moments) -> "TableInputs":
        """Return the encoding with mean and deviation of its numbers, of the moments of encoded
        rows.
        """
        start, columns = 0, []
        for column in self.columns:
            span, start = slice(start, start + column.features), start + column.features
            if column.categories is None:
                mean, deviation = (
                    tuple(values[span].tolist()) for values in (moments.mean, moments.deviation)
                )
                column = replace(column, mean=mean, deviation=deviation)
            columns.append(column)
        return replace(self, columns=tuple(columns))

    def scaled(self, inputs: Tensor) -> Tensor:
        """Return encoded inputs with the mean in empty cells, and standardised if numbers are to
        be.
        """
        figures = [
            (c.mean, c.deviation)
            if c.categories is None
            else ((0.0,) * c.features, (1.0,) * c.features)
            for c in self.columns
        ]
        mean, deviation = (
            torch.tensor(list(chain(*values)), dtype=torch.float64, device=inputs.device)
            for values in zip(*figures, strict=True)
        )
        inputs = torch.where(inputs.isnan(), mean, inputs.double())
        return (inputs - mean) / deviation if self.standardise else inputs


def doubtful_columns(
    table: Any, roles: Columns, source: str, rows: npt.NDArray[np.int64]
) -> list[str]:
    """Return a notice for each input that may be read otherwise than it is meant: text that is
    nearly numbers, text that is nearly unique, and a number that outweighs all others.

    Args:
        table: An Arrow table.
        roles: The roles of its columns.
        source: Its name in notices.
        rows: The rows to train on.
    """
    notices = []
    for name in roles.inputs:
        cells = table.column(name).take(rows)
        title = f"{source}: column {quoted(name)}"
        if not is_text(cells.type):
            notices += _outweighed(_numbers(cells, title), title)
        elif name not in roles.categorical:
            texts, index = categories(cells)
            notices += _doubtful_text(texts, np.bincount(index, minlength=len(texts)), title)
    return notices


def _doubtful_text(texts: Sequence[str], counts: npt.NDArray[np.int64], title: str) -> list[str]:
    filled = {text: int(count) for text, count in zip(texts, counts, strict=True) if text}
    total = sum(filled.values())
    numbers = [text for text in filled if _NUMBER.fullmatch(text.strip())]
    others = [text for text in filled if text not in numbers]
    marked = [text for text in others if _MARKED.fullmatch(text.strip())]
    like_numbers = sum(filled[text] for text in (*numbers, *marked))
    is_code = any(text.lstrip("+-").startswith("0") and text[1:2].isdigit() for text in numbers)
    if others and not is_code and len(filled) > 2 and like_numbers >= _NEARLY * total:
        return [
            f"{title} is {len(filled)} categories of text, though most cells are numbers, because of "
            f"{shortened(', '.join(map(quoted, others)))}: write these as numbers or leave them empty"
        ]
    if total >= _FEW_ROWS and len(filled) > total / 2:
        return [
            f"{title} is {len(filled)} categories in {total} rows, nearly all of them unique, such as names or numbers of "
            "persons: leave it out"
        ]
    return []


def _outweighed(values: npt.NDArray[np.float64], title: str) -> list[str]:
    """Return a notice if one number in a column holds nearly all of its variance."""
    column = values[~np.isnan(values[:, 0]), 0]
    if values.shape[1] > 1 or len(column) < _FEW_ROWS:
        return []
    largest = int(np.abs(column - np.median(column)).argmax())
    rest = np.delete(column, largest)
    spread = float(rest.std())
    if not spread or abs(column[largest] - rest.mean()) < _FAR * spread:
        return []
    return [
        f"{title} holds {column[largest]:g}, which is {_FAR:,.0f} deviations or more from all others, so that these become "
        "nearly equal inputs: correct it or leave its row out"
    ]


def is_text(kind: Any) -> bool:
    """Return True for the type of a column of text or of categories."""
    import pyarrow as pa

    return any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary)
    )


def categories(cells: Any) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the distinct cells of a column as text, and for each row the index of its own."""
    import pyarrow as pa

    if isinstance(cells.type, pa.DictionaryType):
        cells = cells.cast(cells.type.value_type)
    encoded = cells.combine_chunks().dictionary_encode(null_encoding="encode")
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    return [
        _category(value) for value in encoded.dictionary.to_pylist()
    ], encoded.indices.to_numpy().astype(np.int64)


def _category(value: object) -> str:
    """Return a cell as text: an empty one as "", and 1.0 as 1, since whole numbers beside empty cells
    are read as floats.
    """
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _one_hot(cells: Any, names: tuple[str, ...]) -> tuple[npt.NDArray[np.float64], list[str]]:
    """Return 1 in the column of each cell's category, and the categories that are none of `names`."""
    texts, index = categories(cells)
    column = {name: position for position, name in enumerate(names)}
    position = np.array([column.get(text, -1) for text in texts], np.int64)[index]
    block = np.zeros((len(index), len(names)))
    block[np.flatnonzero(position >= 0), position[position >= 0]] = 1
    return block, [text for text in texts if text not in column]


def _numbers(cells: Any, source: str) -> npt.NDArray[np.float64]:
    """Return the numbers of a column, `[n, 1]`, or of lists `[n, length]`, NaN for empty cells."""
    import pyarrow as pa

    kind, is_type = cells.type, pa.types
    values: npt.NDArray[np.float64]
    if is_type.is_list(kind) or is_type.is_fixed_size_list(kind) or is_type.is_large_list(kind):
        try:
            values = np.array(cells.to_pylist(), dtype=np.float64).reshape(len(cells), -1)
        except (ValueError, TypeError):
            raise DataError(f"{source}: lists of different lengths, or not of numbers") from None
    elif any(
        test(kind)
        for test in (
            is_type.is_integer,
            is_type.is_floating,
            is_type.is_boolean,
            is_type.is_decimal,
        )
    ):
        numbers = cells.cast(pa.uint8() if is_type.is_boolean(kind) else pa.float64(), safe=False)
        with reading(source, "no numbers"):
            values = numbers.to_numpy().astype(float)[:, None]
    elif is_type.is_null(kind):
        values = np.full((len(cells), 1), np.nan)
    else:
        raise DataError(f"{source}: {kind} is neither a number nor text: leave it out")
    empty = np.asarray(cells.is_null())[:, None]
    if len(values) and not values.shape[1]:
        raise DataError(f"{source} has lists without a number: leave it out")
    if not np.isfinite(values[~(np.isnan(values) & empty)]).all():
        raise DataError(f"{source}: a NaN or infinity among the numbers")
    # models are float32, and the squares of larger numbers are infinite
    return np.clip(values, -_LARGEST, _LARGEST)
