"""The comparison as a table of cells: the text to show and the number to sort by. Terminal, page
and files show these tables.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedloom.errors import printable
from fedloom.objectives import ACCURACY, Metric
from fedloom.report.summary import LAST, Reach, Row, Spread, Target, TargetValue
from fedloom.report.units import byte_text, percent, time_text

NEVER = "*"  # stands where a target was never reached
SOME = "†"  # follows the mean of the seeds that reached a target where others did not


@dataclass(frozen=True)
class Cell:
    """The text to show and the value to sort by (None: last); `partial` without some seeds."""

    text: str
    value: float | str | None
    partial: bool = False

    def __post_init__(self) -> None:
        """Clean the text, which may be of a stranger's file or site."""
        object.__setattr__(self, "text", printable(self.text))


@dataclass(frozen=True)
class Column:
    """A column's title, its best value (the `largest`, the `smallest` or none, `""`), and how a
    page sorts by it at first (`ascending`, `descending` or never, `""`).
    """

    title: str
    best: str = ""
    order: str = "descending"
    score: bool = False  # its values are of the metric that methods are judged by


Filled = tuple[Column, Sequence[Cell]]
"""A column and its cells, from the first line to the last."""


@dataclass(frozen=True)
class Table:
    """Columns and, in the order of the methods, one line of cells each."""

    columns: tuple[Column, ...]
    lines: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, filled: Sequence[Filled]) -> "Table":
        """Make a table of these columns."""
        columns, cells = zip(*filled, strict=True)
        return cls(columns, tuple(zip(*cells, strict=True)))

    def select(self, columns: Sequence[int]) -> "Table":
        """Return the table of these columns alone."""
        lines = tuple(tuple(line[k] for k in columns) for line in self.lines)
        return Table(tuple(self.columns[k] for k in columns), lines)

    @property
    def best_lines(self) -> list[set[int]]:
        """The lines with the best value, column by column: none unless two values differ as they
        are shown.
        """
        best: list[set[int]] = []
        for k, column in enumerate(self.columns):
            values = {
                row: line[k].value for row, line in enumerate(self.lines) if not line[k].partial
            }
            numbers = {
                row: float(f"{value:.4g}")
                for row, value in values.items()
                if isinstance(value, int | float)
            }
            compared = column.best and len(set(numbers.values())) > 1
            extreme = max if column.best == "largest" else min
            best.append(
                {
                    row
                    for row, value in numbers.items()
                    if compared and value == extreme(numbers.values())
                }
            )
        return best


def comparison(
    rows: Sequence[Row],
    marks: Mapping[str, Mapping[str, str]] | None = None,
    evaluations: int = LAST,
) -> Table:
    """Return rows of `summarise` as a table for people: per cent, bytes in decimal units, seconds;
    mean ± std over seeds.

    `marks` go behind the accuracies, by measure and method.
    """
    metric, reaches = (rows[0].metric, rows[0].reaches) if rows else (ACCURACY, ())
    in_percent = ", %" if metric.share else ""
    smallest = ("smallest", "ascending")
    best = ("largest", "descending") if metric.higher_is_better else smallest

    def score(title: str, measure: str, order: tuple[str, str] = best) -> Filled:
        marked = (marks or {}).get(measure, {})
        cells = [
            score_cell(getattr(row, measure), metric, marked.get(row.algorithm, "")) for row in rows
        ]
        return Column(f"{title}{in_percent}", *order, score=True), cells

    def to_targets(cost: str) -> Iterator[Filled]:
        for k, reach in enumerate(reaches):
            column = Column(
                f"{cost.capitalize()} to {target_text(metric, reach.target)}", *smallest
            )
            yield column, [_cost_to(cost, row.reaches[k], reach) for row in rows]

    def means(
        title: str, name: str, text: Callable[[float], str], order: str = "descending"
    ) -> Filled:
        spreads: list[Spread | None] = [getattr(row, name) for row in rows]
        cells = [
            Cell(text(spread.mean), spread.mean) if spread else Cell("–", None)
            for spread in spreads
        ]
        return Column(title, order=order), cells

    filled: list[Filled] = [
        (Column("Method", order="ascending"), [Cell(row.algorithm, row.algorithm) for row in rows]),
        (Column("Seeds"), [Cell(str(row.seeds), row.seeds) for row in rows]),
        (Column("Rounds"), [Cell(str(row.rounds), row.rounds) for row in rows]),
        score(f"Final {metric.noun}", "final"),
        score(f"Best {metric.noun}", "best"),
        score(f"Mean of last {evaluations}", "last"),
    ]
    if any(row.personal is not None for row in rows):
        filled += [
            score("Clients' own", "personal"),
            score("Std over clients", "client_std", smallest),
            score("Worst tenth", "client_worst"),
        ]
    filled += [*to_targets("rounds"), *to_targets("bytes")]
    if any(row.timed for row in rows):
        filled += to_targets("seconds")
    if any(row.epsilon is not None for row in rows):
        filled.append(means("Epsilon", "epsilon", "{:.3g}".format, "ascending"))
    if any(row.simulated is not None for row in rows):
        filled.append(means("Simulated time", "simulated", time_text))
    filled += [
        means("Bytes down", "bytes_down", byte_text),
        means("Bytes up", "bytes_up", byte_text),
        means("Time", "seconds", time_text),
        (Column("Faults"), [Cell(str(row.faults), row.faults) for row in rows]),
    ]
    return Table.of(filled)


def halves(table: Table) -> tuple[Table, Table]:
    """Split a comparison into accuracies and costs, without seeds and rounds, which a caption says,
    and faults of none.
    """
    accuracy = [k for k, column in enumerate(table.columns) if column.score]
    last = len(table.columns) - all(line[-1].text == "0" for line in table.lines)  # faults
    cost = [k for k in range(3, last) if k not in accuracy]
    return table.select([0, *accuracy]), table.select([0, *cost])


def score_cell(spread: Spread | None, metric: Metric, mark: str = "") -> Cell:
    """Return the cell of a metric over seeds, a share in per cent: `87.21 ± 0.48`, and a mark
    behind it.
    """
    if spread is None:
        return Cell("–", None)
    several, mean, std = spread.count > 1, spread.mean, spread.std
    if metric.name == "bytes":
        return Cell(byte_text(mean) + (f" ± {byte_text(std)}" if several else "") + mark, mean)
    if metric.share:
        mean, std, digits = 100 * mean, 100 * std, 2
    else:  # four digits of the mean, else two of the deviation
        size = math.floor(math.log10(abs(mean))) if mean else 0
        digits = max(0, 3 - size, 1 - math.floor(math.log10(std)) if several and std > 0 else 0)
    return Cell(f"{mean:.{digits}f}{f' ± {std:.{digits}f}' if several else ''}{mark}", spread.mean)


def target_text(metric: Metric, target: TargetValue) -> str:
    """Return a target as people read it: `87.5 %`, `loss ≤ 0.2`."""
    limit = Target.of(target, metric)
    share = metric.share and limit.figure == metric.name
    value = f"{percent(limit.value)} %" if share else f"{limit.value:g}"
    return (
        f"{limit.figure} {'≥' if limit.upwards else '≤'} {value}"
        if isinstance(target, str)
        else value
    )


def _cost_to(cost: str, reach: Reach, baseline: Reach) -> Cell:
    """Return the rounds, bytes or seconds to a target; rounds with their speed-up over the
    `baseline`.
    """
    spread: Spread | None = getattr(reach, cost)
    if spread is None:
        return Cell(NEVER if reach.measured else "–", None)
    mean, several, partial = spread.mean, spread.count > 1, reach.reached < reach.seeds
    if cost == "bytes":
        text = byte_text(mean)
    elif cost == "seconds":
        text = f"{mean:.3g}" + (f" ± {spread.std:.2g}" if several else "")
    else:
        text = f"{mean:.1f} ± {spread.std:.1f}" if several else f"{mean:.0f}"
        if partial:
            return Cell(f"{text} ({reach.reached} of {reach.seeds} seeds)", mean, partial=True)
        if (
            reach is not baseline
            and baseline.rounds is not None
            and baseline.reached == baseline.seeds
        ):
            text += f" ({baseline.rounds.mean / mean:.1f}×)"
    return Cell(text + (SOME if partial else ""), mean, partial)
