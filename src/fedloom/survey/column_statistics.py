"""Statistics of the clients' columns as a value: a table, a frame of pandas, a figure, a page,
JSON.
"""

import html
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from pydantic import TypeAdapter

from fedloom.common.errors import InvalidValue, quoted, shortened
from fedloom.common.fields import Count, Positive, require_fields
from fedloom.data.formats.limits import reading
from fedloom.parts.privacy import OpenShare
from fedloom.report.cells import Cell, Column, table_of
from fedloom.report.figures import COLOURS, ReportFigure, framed
from fedloom.report.frames import data_frame
from fedloom.report.page import rendered
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
    """Return bounds by column of texts such as `age=0,120`.

    Args:
        texts: Texts of the form COLUMN=LOW,HIGH. The last text of a column counts.
        source: Where the texts come from, such as an option, for errors.

    Returns:
        The lowest and the highest value of each column, in the column's units.

    Raises:
        InvalidValue: A text has another form.
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
            drawn = [
                ReportFigure.of(
                    f"column-{number}", shortened(name), "", _figure(column, self._slots)
                )
                for number, (name, column) in enumerate(self.columns.items())
            ]
            text = rendered(
                "statistics.html",
                drawn,
                title="Statistics of the clients' data",
                table=statistics_table(self),
                caption=caption(self),
                figures=drawn,
            )
        else:
            text = json.dumps(asdict(self), indent=1) + "\n"
        write_text(Path(path), text)

    def plot(self) -> go.Figure:
        """Draw the histogram of each column of numbers, and the rows of the most frequent
        categories of each other.
        """
        lines = math.ceil(len(self.columns) / ACROSS) or 1
        titles = [html.escape(shortened(name)) for name in self.columns]
        grid = make_subplots(lines, ACROSS, subplot_titles=titles, vertical_spacing=0.3 / lines)
        for number, column in enumerate(self.columns.values()):
            place = {"row": number // ACROSS + 1, "col": number % ACROSS + 1}
            drawn = _figure(column, self._slots)
            grid.add_trace(drawn.data[0], **place)
            grid.update_xaxes(drawn.layout.xaxis, **place)
            grid.update_yaxes(drawn.layout.yaxis, **place)
        layout = grid.layout.to_plotly_json() | _PANEL
        del layout["template"]
        return framed(grid.data, 60 + HEIGHT * lines, **layout)

    @property
    def _slots(self) -> int:
        """Bars of each figure of categories, so that bars have the same width in all of them."""
        return min(
            DRAWN, max((len(column.categories) for column in self.columns.values()), default=0)
        )


DRAWN = 12
"""Categories of a column that are drawn, those with the most rows."""

ACROSS = 3
"""Columns of the grid of figures."""

HEIGHT = 240
"""Pixels of a figure."""

FLAT = 3
"""Categories that have room for horizontal names."""


LABEL = 12
"""Characters of a category on an axis, at most; the page shows the complete name on hover."""

_PANEL: dict[str, Any] = {"bargap": 0.06, "showlegend": False}


def _figure(column: ColumnStatistics, slots: int) -> go.Figure:
    """Draw the rows of a column: by bin, from the first to the last with rows, or by category.

    Margins are fixed, so that all figures have the same size.
    """
    if column.categories:
        names, rows = zip(*_frequent(column)[:DRAWN], strict=True)
        x: Any = [html.escape(shortened(name)) for name in names]
        cut = [f"{name[:LABEL]}…" if len(name) > LABEL else name for name in names]
        labels = [html.escape(shortened(name)) for name in cut]
        axis: dict[str, Any] = {"type": "category", "range": [-0.5, slots - 0.5]}
        axis |= {"tickvals": x, "ticktext": labels, "tickangle": -35 if slots > FLAT else 0}
    else:
        edges, rows = np.linspace(*column.edges, len(column.bins) + 1), column.bins
        filled = np.flatnonzero(np.array(rows) > 0)
        first, last = (filled[0], filled[-1] + 1) if len(filled) else (0, len(rows))
        x, rows = ((edges[1:] + edges[:-1]) / 2)[first:last], rows[first:last]
        axis = {"range": [edges[first], edges[last]]}
    bars = go.Bar(
        x=x, y=rows, marker_color=COLOURS[0], hovertemplate="%{x}: %{y:,.4~g} rows<extra></extra>"
    )
    return framed(
        [bars],
        HEIGHT,
        xaxis={**axis, "automargin": False},
        yaxis={"automargin": False, "tickformat": "~s"},
        margin={"l": 42, "r": 10, "t": 10, "b": 62},
        **_PANEL,
    )


def statistics_table(statistics: Statistics) -> "pandas.DataFrame":
    """Return a line for each column of the data, without quantities that none of them has."""
    columns = statistics.columns.values()
    quantities = {
        "Rows": [c.count for c in columns],
        "Empty": [c.empty for c in columns],
        "Mean": [c.mean for c in columns],
        "Deviation": [c.deviation for c in columns],
    }
    quantities |= {f"{share:.0%}": [c.quantile(share) for c in columns] for share in QUANTILES}
    names = [shortened(name) for name in statistics.columns]
    filled = {Column("Column", order="ascending"): [Cell(name, name) for name in names]}
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
        text += f"; values from fewer than {survey.smallest} rows of a client are hidden"
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
