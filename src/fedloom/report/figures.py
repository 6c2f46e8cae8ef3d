"""Layout and colours of all figures, and the figures of whole runs, as Plotly figures for
notebooks, files and the report.

A method keeps its colour and its line style in every figure made from the same runs; every trace
carries its method as `legendgroup`. Names that come from users are escaped, since Plotly reads tags
in text.
"""

import html
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.io import renderers
from plotly.offline import get_plotlyjs

from fedloom.objectives import ACCURACY
from fedloom.report.summary import RunSummary, by_algorithm, final
from fedloom.state.files import slug

# After Okabe and Ito (2008): distinguishable with any common colour blindness, on white and on near
# black alike.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d4f", "#8a8f98")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SEQUENCE = "Viridis"  # from early to late, and from low to high

BAND = " Mean over seeds, band ± one standard deviation."  # ends a caption
ROUNDS = {"title": "Round", "rangemode": "tozero"}  # an axis


@dataclass(frozen=True)
class ReportFigure:
    """A figure with its name (of the image file and of the page's element), title and caption, and
    its Plotly figures by the value of the `choice`, a row of buttons that selects one; without a
    choice there is only a variant "".
    """

    name: str
    title: str
    caption: str
    variants: Mapping[str, go.Figure]
    choice: str | None = None

    @classmethod
    def of(cls, name: str, title: str, caption: str, figure: go.Figure) -> "ReportFigure":
        """Return a figure without a choice.

        Args:
            name: Name of the figure, from which the file's name is made.
            title: Title on the page.
            caption: A sentence below the figure.
            figure: The only variant.

        Returns:
            The figure with its variant "".
        """
        return cls(slug(name), title, caption, {"": figure})

    @property
    def informative(self) -> bool:
        """True unless the figure only has dots, or lines between two points, that a table shows."""
        traces = self.variants[next(iter(self.variants))].data
        return any(
            trace.type != "scatter" or trace.mode == "markers" or len(trace.x) > 2
            for trace in traces
        )

    @property
    def height(self) -> int:
        """Height in pixels; reserved until the figure is drawn, so that the page does not jump."""
        return int(max(figure.layout.height for figure in self.variants.values()))


BASIC_TRACES = {"scatter", "bar"}
"""Types of traces that fedloom's figures use and Plotly's basic bundle draws."""


def plotly_script(figures: Sequence[ReportFigure]) -> str:
    """Return Plotly's library for these figures: the basic bundle, a quarter of the size, where it
    draws them all.
    """
    drawn = [figure for entry in figures for figure in entry.variants.values()]
    if {trace.type for figure in drawn for trace in figure.data} <= BASIC_TRACES:
        return (files("fedloom.report") / "assets" / "plotly-basic.min.js").read_text("utf-8")
    return str(get_plotlyjs())


@dataclass(frozen=True)
class Style:
    """Colour and line style of a method in every figure."""

    colour: str
    dash: str


def styles(runs: Sequence[RunSummary]) -> dict[str, Style]:
    """Return a style for each method, in order of first appearance; with more methods than colours,
    line styles differ.
    """
    return {
        name: Style(COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)])
        for k, name in enumerate(by_algorithm(runs))
    }


def accuracy_by_seed(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw each seed's final test accuracy as a dot, the mean over seeds as a bar across; one line
    a method.
    """
    metric = runs[0].metric if runs else ACCURACY
    shown = f"%{{x:{number_format(metric.share, 2)}}}<extra>%{{fullData.name}}</extra>"
    traces: list[go.Scatter] = []
    for name, group in by_algorithm(runs).items():
        scores = {run.seed: value for run in group if (value := final(run)) is not None}
        if not scores:
            continue
        colour, look = styles(runs)[name].colour, {"showlegend": False, "mode": "markers"}
        bar = {"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": colour}}
        dot = {"size": 10, "color": colour, "opacity": 0.55}
        for x, marker, title in (
            ([sum(scores.values()) / len(scores)], bar, "mean"),
            ([*scores.values()], dot, "seed %{customdata}:"),
        ):
            trace = go.Scatter(x=x, y=[wrapped(name)] * len(x), marker=marker, **look)
            traces.append(trace.update(hovertemplate=f"{title} {shown}", **of_method(name)))
        traces[-1].customdata = list(scores)
    lines = [1 + wrapped(name).count("<br>") for name in by_algorithm(runs)]
    return framed(
        traces,
        110 + len(lines) * (9 + 15 * max(lines, default=1)),
        xaxis={
            "title": f"Final test {metric.noun}",
            "tickformat": ".2~%" if metric.share else None,
        },
        yaxis={"autorange": "reversed", "type": "category"},
    )


def label_distribution(
    label_counts: Sequence[Sequence[int]],
    class_names: Sequence[str] | None = None,
    limit: int = 60,
    client_names: Sequence[str] | None = None,
) -> go.Figure:
    """Draw a bubble for the samples that a client has of a class.

    Args:
        label_counts: Numbers of samples, `[clients][classes]`.
        class_names: Names of the classes; by default their numbers.
        limit: Largest number of clients that are drawn, evenly spaced.
        client_names: Names of the clients; by default their numbers.

    Returns:
        The figure. The area of a bubble is proportional to the samples.
    """
    counts = np.array(label_counts, dtype=np.int64)
    classes = counts.shape[1]
    names = [html.escape(name) for name in class_names or map(str, range(classes))]
    shown = evenly_spaced(len(counts), limit)
    clients = [html.escape(name) for name in client_names or map(str, range(len(counts)))]
    client, label = counts[shown].nonzero()
    samples = counts[shown][client, label]
    largest = 26 if len(shown) <= 30 else 18
    area = {
        "size": samples,
        "sizemode": "area",
        "sizeref": 2 * float(samples.max(initial=1)) / largest**2,
    }
    bubbles = go.Scatter(
        x=[clients[shown[k]] for k in client],
        y=[names[k] for k in label],
        customdata=samples,
        mode="markers",
        marker={**area, "sizemin": 1, "color": "#2a88c9", "opacity": 0.7, "line": {"width": 0}},
        hovertemplate="client %{x}, class %{y}<br>%{customdata} samples<extra></extra>",
    )
    # Clients and classes without a bubble stay on the axes.
    across = {"categoryarray": [clients[k] for k in shown], "range": [-0.7, len(shown) - 0.3]}
    up = {"categoryarray": names, "range": [-0.7, classes - 0.3]}
    return framed(
        [bubbles],
        min(720, max(240, 110 + 26 * classes)),
        xaxis={"title": "Client", "type": "category", "showgrid": False, **across},
        yaxis={"title": "Class", "type": "category", **up},
    )


def of_method(name: str) -> dict[str, Any]:
    """Return the keys by which a trace belongs to a method."""
    return {"legendgroup": name, "name": html.escape(name)}


def share_axis(traces: Sequence[Any], from_zero: bool = False) -> dict[str, Any]:
    """Return an axis in per cent that ends near the values of the traces.

    Plotly would draw a constant curve on an axis from 0 to 100 %.

    Args:
        traces: The traces of the figure, with shares in [0, 1].
        from_zero: Begin the axis at 0, as for bars.

    Returns:
        Plotly's settings of the axis.
    """
    low, high = value_range(traces)
    margin = max(0.01, 0.06 * (high - low))
    clip = {"clipmin": max(-0.02, low - margin), "clipmax": min(1.02, high + margin)}
    return {"tickformat": ".2~%"} if from_zero else {"tickformat": ".2~%", "autorangeoptions": clip}


def value_range(traces: Sequence[Any]) -> tuple[float, float]:
    """Return the lowest and the highest value of traces; 0 and 1 without any.

    Args:
        traces: Traces of Plotly; values None are skipped.

    Returns:
        The lowest and the highest value on the y axis.
    """
    values = [float(value) for trace in traces for value in trace.y if value is not None]
    return min(values, default=0.0), max(values, default=1.0)


def align(drawings: Sequence[go.Figure]) -> None:
    """Give all figures the vertical range that shows the values of all."""
    low, high = value_range([trace for figure in drawings for trace in figure.data])
    margin = 0.03 * (high - low) or 0.01
    for figure in drawings:
        figure.layout.yaxis.range = [low - margin, high + margin]


def number_format(share: bool, digits: int = 1) -> str:
    """Return Plotly's format of a share in per cent, or of another number with four digits.

    Args:
        share: True for a share in [0, 1].
        digits: Digits of a per cent after the point.

    Returns:
        The format, such as `.1%`.
    """
    return f".{digits}%" if share else ".4~g"


def evenly_spaced(count: int, limit: int = 60) -> list[int]:
    """Return up to `limit` of the numbers below `count`, evenly spaced, with both ends.

    Args:
        count: Number of all items.
        limit: Largest number of items to choose.

    Returns:
        Numbers in [0, count), ascending.
    """
    return (
        sorted({int(k) for k in np.linspace(0, count - 1, min(count, limit)).round()})
        if count
        else []
    )


def wrapped(name: str, width: int = 24) -> str:
    """Return a name as escaped lines, broken at commas and brackets, then at dots and equals.

    Args:
        name: The name, such as the expression of a method.
        width: Approximate number of characters of a line.

    Returns:
        HTML, with `<br>` between lines.
    """
    text = re.sub(r"([,(])(?=\S)", r"\1 ", name)
    text = re.sub(
        rf"\S{{{width + 1},}}", lambda word: re.sub(r"([=.])(?=\D)", r"\1 ", word[0]), text
    )
    lines = textwrap.wrap(text, width, break_long_words=True) or [""]
    return "<br>".join(html.escape(re.sub(r"([(=.]) ", r"\1", line)) for line in lines)


def pale(colour: str, opacity: float) -> str:
    """Return the colour `#rrggbb` with an opacity.

    Args:
        colour: Red, green and blue in hexadecimal.
        opacity: 0 for an invisible colour, 1 for a solid one.

    Returns:
        The colour as `rgba(...)`.
    """
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


class Drawing(go.Figure):  # type: ignore[misc]
    """A figure that a notebook stores as HTML too, so that it survives an export by nbconvert."""

    def _ipython_display_(self) -> None:
        chosen = "PLOTLY_RENDERER" in os.environ
        if renderers.default == "plotly_mimetype" and not chosen:  # plotly's default in a notebook
            self.show("plotly_mimetype+notebook_connected")
        else:
            super()._ipython_display_()


def framed(traces: Sequence[Any], height: int, **layout: Any) -> go.Figure:
    """Return a figure with the layout that all share, on the page's own background.

    It is made at once, since changing it later is slow.

    Args:
        traces: Traces of Plotly.
        height: Height in pixels.
        **layout: Further settings of Plotly's layout; they replace the common ones.

    Returns:
        The figure.
    """
    title = {"standoff": 10, "font": {"size": 13}}
    axis = {
        "gridcolor": "rgba(128,128,128,0.22)",
        "zeroline": False,
        "automargin": True,
        "title": title,
    }
    common = {
        "template": {"layout": {"xaxis": axis, "yaxis": axis}},
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    return Drawing(list(traces), {**common, **layout})
