"""Columns of tables as a model's inputs: their order, the mean and deviation of numbers, the
categories of text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.common.errors import DataError, quoted, shortened, suggestion
from fedloom.common.fields import Count, require_fields
from fedloom.data.formats.arrow_columns import (
    categories,
    days,
    first_empty,
    holds_dates,
    is_date,
    is_text,
    numbers,
    one_hot,
)
from fedloom.data.formats.limits import require_room

Missing = Literal["refuse", "mean", "drop"]
Dates = Literal["refuse", "ordinal"]

CLIENT = "(file)"
"""Column with the name of each row's file, of a table with one file per client."""

SMALLEST = 5
"""Fewest training rows of a category that the files of a run name."""


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
    before `fitted`. With `other`, one more column of 0 and 1 stands for all categories that too few
    training rows have; none of them is stored.
    """

    name: str
    categories: tuple[str, ...] | None = None
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    width: int = 1
    other: bool = False

    @property
    def features(self) -> int:
        """The number of a model's inputs that the column becomes."""
        return self.width if self.categories is None else len(self.categories) + self.other

    def encoded(
        self, cells: Any, dates: Dates = "refuse"
    ) -> tuple[npt.NDArray[np.float64], list[str]]:
        """Return the inputs of cells, and notices.

        Args:
            cells: Cells of `n` rows.
            dates: Whether dates are numbers.

        Returns:
            `[n, features]`: numbers with NaN in empty cells, or 1 for the cell's category; a line
            for categories that are none of the column's.

        Raises:
            DataError: The cells are of another type.
        """
        title = f"column {quoted(self.name)}"
        if self.categories is not None:
            block, unknown = one_hot(cells, self.categories, self.other)
            listed = shortened(", ".join(map(quoted, unknown)))
            taken = "are not inputs of their own, taken for other"
            if not self.other:
                taken = "the model was not trained on, taken for none"
            return block, [f"{title} has categories that {taken}: {listed}"] if unknown else []
        if is_text(cells.type) and dates == "refuse":
            raise DataError(f"{title} is text, and the model was trained on numbers")
        block = _numbers(cells, title, dates)
        if block.shape[1] != self.width:
            raise DataError(f"{title} has lists of {block.shape[1]} numbers, not of {self.width}")
        return block, []


def _numbers(cells: Any, title: str, dates: Dates) -> npt.NDArray[np.float64]:
    """Return numbers `[n, width]`, of dates the days since 1970 if they are to be ordinal."""
    is_ordinal = dates == "ordinal" and (is_date(cells.type) or is_text(cells.type))
    return days(cells, title) if is_ordinal else numbers(cells, title)


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
    has_options: bool = True  # False for a table in memory, of which `make_task` has few options
    exclude: Sequence[str] = ()
    dates: Dates = "refuse"
    smallest: Count = SMALLEST

    def __post_init__(self) -> None:
        require_fields(self)

    @property
    def groups(self) -> list[str]:
        """The columns of groups as a list."""
        return [self.group] if isinstance(self.group, str) and self.group else list(self.group)

    @property
    def text(self) -> list[str]:
        """The columns that are text, whatever their cells."""
        return [*self.groups, *self.categorical]

    def is_categorical(self, name: str, cells: Any) -> bool:
        """Return True if the cells of this input are categories.

        Args:
            name: Name of the column.
            cells: Its cells, an Arrow column.

        Returns:
            True for text, unless it holds dates that are read as numbers, and for columns in
            `categorical`.
        """
        is_ordinal = self.dates == "ordinal" and holds_dates(cells)
        return name in self.categorical or (is_text(cells.type) and not is_ordinal)

    def leave_out(self, names: Sequence[str]) -> str:
        """Return the setting that leaves out these columns, as users write it."""
        excluded = ", ".join(self._quoted(name) for name in (*self.exclude, *names))
        return f"exclude=[{excluded}]"

    @property
    def ordinal(self) -> str:
        """The setting that takes dates as numbers, as users write it."""
        return f"dates={self._quoted('ordinal')}"

    def _quoted(self, text: str) -> str:
        """Quote a text; in a TOML file, double quotes surround the whole table(...)."""
        return repr(text) if self.has_options else json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class TableInputs:
    """Rows of a table as float inputs `[n, features]`, of its columns in this order; see the data
    set `table`.
    """

    columns: tuple[TableColumn, ...]
    missing: Missing = "refuse"
    standardise: bool = True
    dates: Dates = "refuse"
    kind: Literal["table"] = "table"

    @classmethod
    def of(cls, table: Any, roles: Columns, rows: npt.NDArray[np.int64]) -> "TableInputs":
        """Return the encoding of a table's inputs, before `fitted` adds the figures of numbers.

        Args:
            table: Arrow table.
            roles: Roles of its columns.
            rows: Rows to train on; categories are those that `smallest` of these rows have.

        Returns:
            Categories of columns of text, and widths of columns of numbers.
        """
        columns = []
        for name in roles.inputs:
            cells = table.column(name)
            if roles.is_categorical(name, cells):
                texts, index = categories(cells)
                rows_of_each = np.bincount(index[rows], minlength=len(texts)).tolist()
                counts = dict(zip(texts, rows_of_each, strict=True))
                present = sorted(text for text, count in counts.items() if count)
                # An empty cell identifies no row.
                named = [t for t in present if counts[t] >= roles.smallest or not t]
                columns.append(TableColumn(name, (*named,), other=len(named) < len(present)))
            else:
                first = cells.drop_null().slice(0, 1)
                width = _numbers(first, f"column {quoted(name)}", roles.dates).shape[1]
                columns.append(TableColumn(name, width=width))
        return cls(tuple(columns), roles.missing, roles.standardise, roles.dates)

    @property
    def features(self) -> int:
        """The number of inputs of a model."""
        return sum(column.features for column in self.columns)

    @property
    def is_fitted(self) -> bool:
        """True if every column of numbers has a mean and a deviation."""
        return all(column.mean for column in self.columns if column.categories is None)

    def encode(self, table: Any) -> tuple[Tensor, list[str]]:
        """Return the inputs of an Arrow table, and notices.

        Args:
            table: Table of `n` rows.

        Returns:
            `[n, features]` float64, numbers as they are and NaN in empty cells, 0 for a category
            that is none of the column's; a line for each notice.

        Raises:
            DataError: A column is missing or of another type, or a cell is empty unless `missing`
                is `mean`.
        """
        widest = max(self.columns, key=lambda column: column.features)
        title = f"{widest.features} inputs of {quoted(widest.name)}"
        require_room(8 * self.features * len(table), title)
        blocks: list[npt.NDArray[np.float64]] = []
        notices: list[str] = []
        # Arrow looks for a name among all
        by_name = dict(zip(table.column_names, table.columns, strict=True))
        for column in self.columns:
            if column.name not in by_name:
                near = suggestion(column.name, by_name)
                raise DataError(
                    f"no column {quoted(column.name)}, which the model was trained on{near}"
                )
            cells = by_name[column.name]
            block, told = column.encoded(cells, self.dates)
            if self.missing != "mean" and (empty := first_empty(cells)):
                raise DataError(f"column {quoted(column.name)} {empty}: fill it")
            blocks.append(block)
            notices += told
        return torch.from_numpy(np.concatenate(blocks, axis=1)), notices

    def fitted(self, moments: Moments) -> "TableInputs":
        """Return the encoding with mean and deviation of its numbers, of the moments of encoded
        rows.
        """
        start = 0
        columns = []
        for column in self.columns:
            end = start + column.features
            if column.categories is None:
                mean = tuple(moments.mean[start:end].tolist())
                deviation = tuple(moments.deviation[start:end].tolist())
                column = replace(column, mean=mean, deviation=deviation)
            columns.append(column)
            start = end
        return replace(self, columns=tuple(columns))

    def scaled(self, inputs: Tensor) -> Tensor:
        """Return encoded inputs with the mean in empty cells, and standardised if numbers are to
        be.
        """
        means: list[float] = []
        deviations: list[float] = []
        for column in self.columns:
            is_number = column.categories is None
            means += column.mean if is_number else [0.0] * column.features
            deviations += column.deviation if is_number else [1.0] * column.features
        mean, deviation = inputs.new_tensor([means, deviations], dtype=torch.float64)
        inputs = torch.where(inputs.isnan(), mean, inputs.double())
        return (inputs - mean) / deviation if self.standardise else inputs
