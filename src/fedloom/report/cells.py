"""Tables for people: frames whose columns are labelled by `Column` and hold `Cell` values.

The terminal, the page, notebooks and files show these tables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedloom.common.errors import printable
from fedloom.objectives import Metric
from fedloom.report.summary import Spread, Target, TargetValue
from fedloom.report.units import byte_text, percent

if TYPE_CHECKING:
    import pandas

NEVER = "*"  # shown where a target was never reached
SOME = "†"  # follows the mean of the seeds that reached a target where others did not


@dataclass(frozen=True)
class Cell:
    """The text to show and the value to sort by (None: last); `partial` without some seeds."""

    text: str
    value: float | str | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        """Replace unprintable characters; the text may come from a file or a site."""
        object.__setattr__(self, "text", printable(self.text))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Column:
    """A column's title, its best value (the `largest`, the `smallest` or none, `""`), and how a
    page sorts by it at first (`ascending`, `descending` or never, `""`).

    Columns are distinct, even with the same title: methods and settings name some of them.
    """

    title: str
    best: str = ""
    order: str = "descending"
    score: bool = False  # its values are of the metric that methods are judged by

    @property
    def line(self) -> str:
        """The title on one line."""
        return " ".join(self.title.splitlines())


def table_of(columns: Mapping[Column, Sequence[Cell]]) -> "pandas.DataFrame":
    """Return the table with these columns."""
    import pandas

    return pandas.DataFrame(columns, dtype=object)


def best_cells(table: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return True for each cell with the best value of its column, as it is shown; of no column
    where all shown values are equal.
    """

    def is_best(cells: "pandas.Series") -> list[bool]:
        column: Column = cells.name
        numbers = [_number(cell) for cell in cells]
        distinct = {number for number in numbers if number is not None}
        if not column.best or len(distinct) < 2:
            return [False] * len(numbers)
        best = max(distinct) if column.best == "largest" else min(distinct)
        return [number == best for number in numbers]

    return table.apply(is_best, result_type="broadcast").astype(bool)


def _number(cell: Cell) -> float | None:
    """Return the value of a cell with the digits that are shown; None for text and partial
    means.
    """
    if cell.partial or not isinstance(cell.value, int | float):
        return None
    return float(f"{cell.value:.4g}")


def score_cell(spread: Spread | None, metric: Metric, mark: str = "") -> Cell:
    """Return the cell of a metric over seeds, such as `87.21 ± 0.48`.

    Args:
        spread: Mean and deviation in the metric's units, shares in [0, 1]; None if nothing was
            measured.
        metric: The metric. Shares are shown in per cent, bytes with their unit.
        mark: Text behind the figure, such as `SOME`.

    Returns:
        The cell, sorted by the mean. It has no deviation for a single seed.
    """
    if spread is None:
        return Cell("–")
    several, mean, std = spread.count > 1, spread.mean, spread.std
    if metric.name == "bytes":
        texts = byte_text(mean), byte_text(std)
    else:
        digits = 2
        if metric.share:
            mean, std = 100 * mean, 100 * std
        else:  # four digits of the mean, or two of the deviation
            size = math.floor(math.log10(abs(mean))) if mean else 0
            digits = max(0, 3 - size, 1 - math.floor(math.log10(std)) if several and std > 0 else 0)
        texts = f"{mean:.{digits}f}", f"{std:.{digits}f}"
    return Cell(" ± ".join(texts if several else texts[:1]) + mark, spread.mean)


def target_text(metric: Metric, target: TargetValue) -> str:
    """Return a target as people read it: `87.5 %`, `loss ≤ 0.2`.

    Args:
        metric: The metric of the task.
        target: A value of the metric, or the limit of a figure.

    Returns:
        The text; shares are in per cent.
    """
    limit = Target.of(target, metric)
    share = metric.share and limit.figure == metric.name
    value = f"{percent(limit.value)} %" if share else f"{limit.value:g}"
    if not isinstance(target, str):
        return value
    return f"{limit.figure} {'≥' if limit.upwards else '≤'} {value}"
