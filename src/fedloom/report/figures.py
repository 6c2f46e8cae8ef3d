"""The figures of runs, as Plotly figures: to show in a notebook, to save, and for the report's page.

A method keeps its colour and its line style in every figure made from the same runs; every trace carries its method as
`legendgroup`. Names that come from users are escaped, since Plotly reads tags in text.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedloom.errors import InvalidValue
from fedloom.report.curves import Curve, curve
from fedloom.report.summary import RunSummary, Spread, best, by_algorithm, bytes_down, bytes_up, final, seconds
from fedloom.report.tables import byte_text, time_text

# After Okabe and Ito (2008): told apart by people with any common colour blindness, on white and on near black alike.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d4f", "#8a8f98")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
BUBBLE = "#2a88c9"

POINTS = 400
"""Points of a curve that are drawn; more than a screen is wide shows nothing more."""

SHARES = {"tickformat": ".2~%", "autorangeoptions": {"clipmin": -0.02, "clipmax": 1.02}}
"""An axis of shares: in percent, and never far beyond what a share can be, as a level curve would have it."""

FEW = 8
"""Up to so many methods share one box when the mouse rests on a figure of curves."""

MEASURES = {
    "accuracy": "Test accuracy",
    "personal_accuracy": "Personal accuracy",
    "client_accuracy": "Accuracy at the clients",
    "new_client_accuracy": "Accuracy at new clients",
    "loss": "Test loss",
    "training_loss": "Training loss",
    "pool_cosine": "Mean cosine similarity",
}
_X_TITLES = {"round": "Round", "bytes": "Bytes sent, down and up", "seconds": "Seconds"}


@dataclass(frozen=True)
class Style:
    """How a method is drawn in every figure."""

    colour: str
    dash: str


def styles(runs: Sequence[RunSummary]) -> dict[str, Style]:
    """A style for each method, in order of first appearance; beyond the colours there are, line styles differ."""
    return {
        name: Style(COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)])
        for k, name in enumerate(by_algorithm(runs))
    }


def title_of(measure: str) -> str:
    """What a figure of the records is called."""
    return MEASURES.get(measure, measure.replace("_", " ").capitalize())


def learning_curves(
    runs: Sequence[RunSummary], measure: str = "accuracy", x: str = "round", points: int = POINTS
) -> go.Figure:
    """A measure of the records over rounds, bytes or seconds: mean over seeds, with a band of ± one standard deviation.

    `measure` is `accuracy`, `loss`, `training_loss`, `pool_cosine` or any other figure of the records. A curve of more than
    `points` points shows the lowest and the highest of every stretch. Methods that did not record it are left out; so is
    all that lacks what `x` needs. Raises `InvalidValue` for an unknown `x`.
    """
    traces: list[go.Scatter] = []
    share = "accuracy" in measure
    form = ".1%" if share else ".4~g"
    for name, style in styles(runs).items():
        found = curve(by_algorithm(runs)[name], measure, x)
        if found is None:
            continue
        drawn = found.thinned(points)
        if drawn.seeds > 1:
            traces.append(_band(name, style, drawn))
        traces.append(_line(name, style, drawn, form))
    return framed(
        traces,
        380,
        xaxis={"title": _X_TITLES[x], "rangemode": "tozero", **_x_form(x)},
        yaxis={"title": html.escape(title_of(measure)), "hoverformat": form, **(SHARES if share else {})},
        hovermode="x unified" if len(styles(runs)) <= FEW and x == "round" else "closest",
    )


def accuracy_by_seed(runs: Sequence[RunSummary], measure: str = "final") -> go.Figure:
    """Each seed's `final` or `best` test accuracy as a dot, the mean over seeds as a bar across; one line a method."""
    if measure not in ("final", "best"):
        raise InvalidValue(f"measure {measure!r} is not allowed (allowed: final, best)")
    of = final if measure == "final" else best
    traces: list[go.Scatter] = []
    for name, group in by_algorithm(runs).items():
        found = {run.seed: value for run in group if (value := of(run)) is not None}
        if not found:
            continue
        colour = styles(runs)[name].colour
        label = wrapped(name)
        common: dict[str, Any] = {"legendgroup": name, "name": html.escape(name), "showlegend": False}
        mean = go.Scatter(
            x=[sum(found.values()) / len(found)],
            y=[label],
            mode="markers",
            marker={"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": colour}},
            hovertemplate="mean %{x:.2%}<extra>%{fullData.name}</extra>",
            **common,
        )
        dots = go.Scatter(
            x=list(found.values()),
            y=[label] * len(found),
            customdata=list(found),
            mode="markers",
            marker={"size": 10, "color": colour, "opacity": 0.55},
            hovertemplate="seed %{customdata}: %{x:.2%}<extra>%{fullData.name}</extra>",
            **common,
        )
        traces += [mean, dots]
    return framed(
        traces,
        _bar_height(runs),
        xaxis={"title": f"{measure.capitalize()} test accuracy", "tickformat": ".2~%"},
        yaxis={"autorange": "reversed", "type": "category"},
    )


def label_distribution(
    label_counts: Sequence[Sequence[int]], class_names: Sequence[str] | None = None, limit: int = 60
) -> go.Figure:
    """Who holds what: a bubble for each client (across) and class (up), its area proportional to the samples.

    `label_counts` is `[clients][classes]`. Of more than `limit` clients, `limit` evenly spaced ones are drawn. Raises
    `InvalidValue` when the names are not as many as the classes or the rows are not equally long.
    """
    classes = len(label_counts[0]) if label_counts else 0
    if any(len(row) != classes for row in label_counts):
        raise InvalidValue("label counts need the same number of classes for every client")
    if class_names is not None and len(class_names) != classes:
        raise InvalidValue(f"there are {classes} classes, but {len(class_names)} class names")
    names = [html.escape(name) for name in class_names or map(str, range(classes))]
    counts = np.array(label_counts, dtype=np.int64).reshape(len(label_counts), classes)
    shown = shown_clients(len(counts), limit)
    client, label = counts[shown].nonzero()
    samples = counts[shown][client, label]
    largest = 26 if len(shown) <= 30 else 18
    bubbles = go.Scatter(
        x=[str(shown[k]) for k in client],
        y=[names[k] for k in label],
        customdata=samples,
        mode="markers",
        marker={
            "size": samples,
            "sizemode": "area",
            "sizeref": 2 * float(samples.max(initial=1)) / largest**2,
            "sizemin": 1,
            "color": BUBBLE,
            "opacity": 0.7,
            "line": {"width": 0},
        },
        hovertemplate="client %{x}, class %{y}<br>%{customdata} samples<extra></extra>",
    )
    # One trace leaves out what is empty; the order of the axes must not depend on what is there.
    across = {"categoryarray": [str(k) for k in shown], "range": [-0.7, len(shown) - 0.3]}
    up = {"categoryarray": names, "range": [-0.7, classes - 0.3]}
    return framed(
        [bubbles],
        min(720, max(240, 110 + 26 * classes)),
        xaxis={"title": "Client", "type": "category", "showgrid": False, **across},
        yaxis={"title": "Class", "type": "category", **up},
    )


def shown_clients(clients: int, limit: int = 60) -> list[int]:
    """Up to `limit` of the client numbers, evenly spaced, the first and the last among them."""
    return sorted({int(k) for k in np.linspace(0, clients - 1, min(clients, limit)).round()}) if clients else []


def byte_bars(runs: Sequence[RunSummary]) -> go.Figure:
    """Bytes of a whole run, mean over seeds: full colour down to the clients, pale up from them."""
    traces: list[go.Bar] = []
    for name, group in by_algorithm(runs).items():
        for direction, of, opacity in (("down", bytes_down, 0.95), ("up", bytes_up, 0.5)):
            total = sum(of(run) for run in group) / len(group)
            hover = f"{direction} {byte_text(total)}"
            traces.append(_bar(name, styles(runs)[name].colour, opacity, total, hover))
    return _bars(traces, runs, "Bytes of a run", _x_form("bytes"))


def second_bars(runs: Sequence[RunSummary]) -> go.Figure:
    """Seconds of a whole run, mean over seeds with ± one standard deviation. Methods without kept times are left out."""
    traces: list[go.Bar] = []
    for name, group in by_algorithm(runs).items():
        spread = Spread.of([value for run in group if (value := seconds(run)) is not None])
        if spread is None:
            continue
        bar = _bar(name, styles(runs)[name].colour, 0.95, spread.mean, time_text(spread.mean))
        bar.error_x = {"type": "data", "array": [spread.std], "visible": spread.count > 1, "color": "#808080"}
        traces.append(bar)
    return _bars(traces, runs, "Seconds of a run", {})


def wrapped(name: str, width: int = 24) -> str:
    """A name as escaped lines of about `width` characters, broken behind commas and brackets first, then behind dots and signs
    of equality."""
    text = re.sub(r"([,(])(?=\S)", r"\1 ", name)
    text = re.sub(rf"\S{{{width + 1},}}", lambda word: re.sub(r"([=.])(?=\D)", r"\1 ", word[0]), text)
    lines = textwrap.wrap(text, width, break_long_words=True) or [""]
    return "<br>".join(html.escape(re.sub(r"([(=.]) ", r"\1", line)) for line in lines)


def _line(name: str, style: Style, drawn: Curve, form: str) -> go.Scatter:
    deviation = f" ± %{{customdata:{form}}}" if drawn.seeds > 1 else ""
    return go.Scatter(
        x=drawn.x.astype(np.float32),
        y=drawn.mean.astype(np.float32),
        customdata=drawn.std.astype(np.float32) if drawn.seeds > 1 else None,
        mode="lines+markers" if len(drawn.x) <= 2 else "lines",
        line={"color": style.colour, "width": 2, "dash": style.dash},
        hovertemplate=f"%{{y:{form}}}{deviation}",
        name=html.escape(name),
        legendgroup=name,
    )


def _band(name: str, style: Style, drawn: Curve) -> go.Scatter:
    return go.Scatter(
        x=np.concatenate([drawn.x, drawn.x[::-1]]).astype(np.float32),
        y=np.concatenate([drawn.mean + drawn.std, (drawn.mean - drawn.std)[::-1]]).astype(np.float32),
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=pale(style.colour, 0.16),
        hoverinfo="skip",
        showlegend=False,
        name=html.escape(name),
        legendgroup=name,
    )


def _bar(name: str, colour: str, opacity: float, value: float, hover: str) -> go.Bar:
    return go.Bar(
        y=[wrapped(name)],
        x=[value],
        orientation="h",
        marker={"color": colour, "opacity": opacity},
        hovertemplate=f"{hover}<extra>%{{fullData.name}}</extra>",
        name=html.escape(name),
        legendgroup=name,
        showlegend=False,
    )


def _bars(traces: Sequence[go.Bar], runs: Sequence[RunSummary], title: str, form: dict[str, Any]) -> go.Figure:
    return framed(
        traces,
        _bar_height(runs),
        barmode="stack",
        bargap=0.35,
        xaxis={"title": title, "rangemode": "tozero", **form},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False},
    )


def _bar_height(runs: Sequence[RunSummary]) -> int:
    names = [wrapped(name) for name in by_algorithm(runs)]
    return 110 + len(names) * (24 + 15 * max((name.count("<br>") for name in names), default=0))


def _x_form(x: str) -> dict[str, Any]:
    return {"tickformat": "~s", "ticksuffix": "B", "hoverformat": ".3s"} if x == "bytes" else {}


def pale(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def framed(traces: Sequence[Any], height: int, **layout: Any) -> go.Figure:
    """A figure with what all share; ground and text are left see-through enough for light and dark pages.

    The layout is made in one go: changing a Plotly layout costs far more than making it.
    """
    axis = {
        "gridcolor": "rgba(128,128,128,0.22)",
        "zeroline": False,
        "automargin": True,
        "title": {"standoff": 10, "font": {"size": 13}},
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
    return go.Figure(list(traces), {**common, **layout})
