"""Statistics of the clients' columns as a value: a table, a frame of pandas, a figure, a page,
JSON.
"""

import html
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from pydantic import TypeAdapter

from fedloom.common.errors import InvalidValue, quoted, shortened
from fedloom.common.fields import Count, Positive, require_fields
from fedloom.data.formats.limits import reading
from fedloom.parts.privacy import OpenShare
from fedloom.report.cells import Cell, Column, table_of
from fedloom.report.figures import COLOURS
from fedloom.report.frames import data_frame, html_table
from fedloom.state.files import write_text

if TYPE_CHECKING:
    import pandas

Kind = Literal["numbers", "categories"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MOST_BINS = 10_000
"""Number of bins of a histogram, at most."""

REACH = 4
"""Deviations from the mean, to both sides, that bins cover where no bounds are given."""


@dataclass(frozen=True)
class Survey:
    """Settings of the statistics.

    Args:
        smallest: Fewest rows of a client that a number may tell of; 1 leaves nothing out.
        bins: Number of bins of a histogram.
        bounds: Lowest and highest value of columns, to which numbers are clipped; with `epsilon`
            every column of numbers needs them. Without bounds, bins reach 4 deviations from the
            mean.
        epsilon: Privacy that all numbers together cost a row, by Gaussian noise that clients add to
            their own; None adds none.
        delta: Probability of a larger loss.
    """

    smallest: Count = 5
    bins: Count = 32
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    epsilon: Positive | None = None
    delta: OpenShare = 1e-5

    def __post_init__(self) -> None:
        require_fields(self)
        if self.bins > MOST_BINS:
            raise InvalidValue(f"bins must be at most {MOST_BINS}, not {self.bins}")
        for name, (low, high) in self.bounds.items():
            if not -math.inf < low < high < math.inf:
                raise InvalidValue(
                    f"bounds of {quoted(name)} must be a lower and a higher number, not "
                    f"{low:g} and {high:g}"
                )


def read_bounds(texts: Iterable[str], source: str) -> dict[str, tuple[float, float]]:
    """Return bounds by column of texts such as `age=0,120`. Raises `InvalidValue`, naming the
    source, for others.
    """
    bounds = {}
    for text in texts:
        name, _, numbers = text.strip().rpartition("=")
        try:
            low, high = map(float, numbers.split(","))
        except ValueError:
            raise InvalidValue(
                f"{source} {text!r} is not COLUMN=LOW,HIGH, such as age=0,120"
            ) from None
        bounds[name] = low, high
    return bounds


@dataclass(frozen=True)
class ColumnStatistics:
    """Statistics of one column over all clients.

    Attributes:
        kind: `numbers` or `categories`.
        count: Rows with a value.
        empty: Rows without one.
        mean: Mean of numbers.
        deviation: Population standard deviation of numbers.
        edges: Lowest and highest edge of the bins.
        bins: Rows in each bin.
        categories: Rows of each category.
    """

    kind: Kind
    count: float = 0.0
    empty: float = 0.0
    mean: float = math.nan
    deviation: float = math.nan
    edges: tuple[float, float] = (0.0, 0.0)
    bins: tuple[float, ...] = ()
    categories: Mapping[str, float] = field(default_factory=dict)

    def quantile(self, share: float) -> float:
        """Return the number below which this share of the rows lies, to the width of a bin; NaN
        without bins.
        """
        if np.count_nonzero(np.maximum(self.bins, 0)) == 1:
            return self.mean  # which is in that bin
        cumulative = np.cumsum([0.0, *np.maximum(self.bins, 0)])
        edges = np.linspace(*self.edges, len(cumulative))
        return (
            float(np.interp(share * cumulative[-1], cumulative, edges))
            if cumulative[-1]
            else math.nan
        )


@dataclass(frozen=True)
class Statistics:
    """Statistics of all columns over all clients.

    Attributes:
        columns: Statistics by the column's name.
        clients: Number of clients.
        survey: Settings.
        noise: Standard deviation of the noise, in units of the most that one row changes a number.
        releases: Noisy numbers to which one row contributes.
    """

    columns: Mapping[str, ColumnStatistics]
    clients: int
    survey: Survey = field(default_factory=Survey)
    noise: float = 0.0
    releases: int = 0

    @classmethod
    def read(cls, path: Path) -> "Statistics":
        """Read the JSON that `save` wrote. Raises `DataError` for anything else."""
        with reading(path, "no statistics"):
            statistics: Statistics = TypeAdapter(cls).validate_json(path.read_bytes())
        return statistics

    def frame(self) -> "pandas.DataFrame":
        """Return a row for each column of the data: its kind, rows, empty cells, mean, deviation
        and quantiles.
        """
        lines = []
        for name, column in self.columns.items():
            figures = {
                key: value
                for key, value in vars(column).items()
                if key not in ("edges", "bins", "categories")
            }
            lines.append(
                {"column": name}
                | figures
                | {f"{share:.0%}": column.quantile(share) for share in QUANTILES}
            )
        return data_frame(lines).set_index("column")

    def save(self, path: str | Path) -> None:
        """Write a page with the table and the figure where the name ends in `.html`, and else all
        numbers as JSON.
        """
        if Path(path).suffix == ".html":
            figure = self.plot().to_html(
                full_html=False, config={"displaylogo": False, "responsive": True}
            )
            text = _PAGE.format(
                table=html_table(statistics_table(self), [caption(self)]), figure=figure
            )
        else:
            text = json.dumps(asdict(self), indent=1) + "\n"
        write_text(Path(path), text)

    def plot(self) -> go.Figure:
        """Draw the histogram of each column of numbers, and the rows of the most frequent
        categories of each other.
        """
        count = len(self.columns)
        titles = [html.escape(shortened(name)) for name in self.columns]
        figure = make_subplots(
            count, 1, subplot_titles=titles, vertical_spacing=0.3 / max(1, count)
        )
        for row, column in enumerate(self.columns.values(), 1):
            listed = _frequent(column)[:DRAWN]
            edges, rows = np.linspace(*column.edges, len(column.bins) + 1), np.array(column.bins)
            x = (
                [html.escape(shortened(text)) for text, _ in listed]
                if column.categories
                else (edges[1:] + edges[:-1]) / 2
            )
            y = [count for _, count in listed] if column.categories else rows
            figure.add_bar(x=x, y=y, row=row, col=1, marker_color=COLOURS[0])
            figure.update_xaxes(row=row, col=1, type="category" if column.categories else "linear")
            figure.update_yaxes(row=row, col=1, title="Rows")
        look = {
            "template": "plotly_white",
            "showlegend": False,
            "bargap": 0.02,
            "margin": {"l": 60, "r": 20, "t": 60},
        }
        return figure.update_layout(height=120 + 200 * count, **look)


DRAWN = 12
"""Categories of a column that are drawn, those with the most rows."""

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Statistics of the clients' data</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 1100px; padding: 0 1rem; }}
td, th {{ padding: 2px 10px; text-align: right; white-space: nowrap; }} td:first-child {{ text-align: left; }}
</style></head>
<body><h1>Statistics of the clients' data</h1><div style="overflow-x: auto">{table}</div>{figure}</body></html>
"""


def statistics_table(statistics: Statistics) -> "pandas.DataFrame":
    """Return a line for each column of the data, without quantities that none of them has."""
    columns = statistics.columns.values()
    quantities = {"Rows": [c.count for c in columns], "Empty": [c.empty for c in columns], "Mean": [c.mean for c in columns],
                  "Deviation": [c.deviation for c in columns]}  # fmt: skip
    quantities |= {f"{share:.0%}": [c.quantile(share) for c in columns] for share in QUANTILES}
    filled = {Column("Column"): [Cell(shortened(name), name) for name in statistics.columns]}
    for title, values in quantities.items():
        if any(value == value and value for value in values):
            filled[Column(title)] = [
                _cell(value, c) for value, c in zip(values, columns, strict=True)
            ]
    if any(c.categories for c in columns):
        texts = [
            ", ".join(f"{shortened(text)} ({rows:,.0f})" for text, rows in _frequent(c)[:3])
            for c in columns
        ]
        filled[Column("Most frequent", order="")] = [Cell(text) for text in texts]
    return table_of(filled)


def caption(statistics: Statistics) -> str:
    """Return the limits of the figures in a few sentences."""
    survey, text = statistics.survey, f"{statistics.clients} clients"
    if statistics.noise:
        text += (
            f"; every number has noise: ε = {survey.epsilon:g} for a row at δ = {survey.delta:g}"
        )
    elif survey.smallest > 1:
        text += f"; what fewer than {survey.smallest} rows of a client say is left out"
    return f"{text}. Quantiles are read from {survey.bins} bins."


def _cell(value: float, column: ColumnStatistics) -> Cell:
    """Return a whole number, or four digits of another, 0 for one that is rounding beside the
    deviation.
    """
    rounding = abs(value) < 1e-6 * column.deviation
    text = (
        ""
        if math.isnan(value)
        else f"{value:,.0f}"
        if value == round(value)
        else f"{0 if rounding else value:.4g}"
    )
    return Cell(text, None if math.isnan(value) else value)


def _frequent(column: ColumnStatistics) -> list[tuple[str, float]]:
    return sorted(column.categories.items(), key=lambda item: (-item[1], item[0]))
