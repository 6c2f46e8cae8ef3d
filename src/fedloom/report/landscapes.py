"""Loss surfaces as Plotly figures: around final models (FedMR, figure 6), and under the trajectory of a client's models
(FedALA, figure 4)."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedloom.report.figures import SEQUENCE, Style, framed

LEVELS = 24  # contour lines from the lowest to the highest loss
COLUMNS = 3  # panels side by side; more go below

Entry = Mapping[str, Any]
"""The result of one recorder (`Recorder.result`)."""

_ORANGE = "#d55e00"
_BAR = {"title": {"text": "Loss"}, "thickness": 12, "outlinewidth": 0}
_CONTOUR = {"width": 0.5, "color": "rgba(255,255,255,0.5)"}


def landscapes(entries: Mapping[str, Entry], scale: Sequence[Entry] | None = None) -> go.Figure:
    """Draw results of the recorder `landscape` side by side, each below its title, with the same axes, contour lines and colours.

    The lowest and the highest loss of `scale`, by default of all that are drawn, bound lines and colours, which follow the
    logarithm of the loss.
    """
    lines = [line for entry in scale or entries.values() for line in entry["surface"]]
    losses = [value for line in lines for value in line if value is not None] or [1.0]
    low, high = _log(min(losses)), _log(max(losses))
    high = max(high, low + 1e-3)
    traces: list[go.Contour | go.Scatter] = []
    layout: dict[str, Any] = {"annotations": []}
    columns, rows = min(COLUMNS, len(entries)), math.ceil(len(entries) / COLUMNS)
    for k, (name, entry) in enumerate(entries.items()):
        axis = str(k + 1) if k else ""
        traces += _panel(name, entry, axis, low, high)
        across, up = _interval(k % columns, columns, 0.07), _interval(rows - 1 - k // columns, rows, 0.16)
        edge = {"showgrid": False, "constrain": "domain", "range": [entry["x"][0], entry["x"][-1]]}
        layout[f"xaxis{axis}"] = {**edge, "title": "First direction", "domain": across, "anchor": f"y{axis}"}
        vertical = {"title": "" if k % columns else "Second direction", "domain": up, "anchor": f"x{axis}"}
        layout[f"yaxis{axis}"] = {**edge, **vertical, "scaleanchor": f"x{axis}", "scaleratio": 1}
        if len(entries) > 1:
            position = {"x": sum(across) / 2, "y": up[1], "xref": "paper", "yref": "paper", "yanchor": "bottom"}
            title = {"text": html.escape(name), **position, "showarrow": False, "font": {"size": 14}}
            layout["annotations"].append(title)
    ticks = np.linspace(low, high, 5)
    bar = {**_BAR, "tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks]}
    colours = {"colorscale": SEQUENCE, "reversescale": True, "cmin": low, "cmax": high, "colorbar": bar}
    return framed(traces, 440, hovermode="closest", showlegend=False, coloraxis=colours, **layout)


def cross_sections(entries: Mapping[str, Entry], looks: Mapping[str, Style]) -> go.Figure:
    """Draw landscapes by method, cut through the model: the loss along the first direction (solid) and the second (dotted)."""
    traces = []
    for name, entry in entries.items():
        middle = len(entry["x"]) // 2
        cuts = entry["surface"][middle], [line[middle] for line in entry["surface"]]
        for direction, dash, values in zip(("first", "second"), ("solid", "dot"), cuts, strict=True):
            line = {"color": looks[name].colour, "width": 2.5, "dash": dash}
            label, hover = f"{html.escape(name)}, {direction}", "%{y:.4~g} at %{x:.3~g}<extra>%{fullData.name}</extra>"
            cut = go.Scatter(x=entry["x"], y=values, mode="lines", line=line, name=label, hovertemplate=hover)
            traces.append(cut.update(legendgroup=name))
    xaxis, yaxis = {"title": "Distance from the model, in filter norms"}, {"title": "Loss", "rangemode": "tozero"}
    return framed(traces, 380, xaxis=xaxis, yaxis=yaxis, hovermode="closest")


def losses_by_round(method: str, recorded: Entry) -> go.Figure:
    """Draw the loss of a client's models over the rounds, where these span no plane."""
    x, y, look = recorded["rounds"], recorded["losses"], {"line": {"color": _ORANGE}, "showlegend": False}
    line = go.Scatter(x=x, y=y, mode="lines+markers", legendgroup=method, **look)
    return framed([line], 380, xaxis={"title": "Round"}, yaxis={"title": "Training loss"})


def trajectories(recorded: Entry, looks: Mapping[str, Style], method: str | None = None) -> go.Figure:
    """Draw the trajectories of one client's models over its local loss in the plane of their two principal components: with
    several methods, in their colours, or with one `method`."""
    paths = recorded["methods"] if method is None else {method: recorded}
    surface = go.Contour(
        x=recorded["x"],
        y=recorded["y"],
        z=recorded["surface"],
        colorscale=SEQUENCE,
        reversescale=True,
        ncontours=LEVELS,
        line=_CONTOUR,
        colorbar=_BAR,
        hovertemplate="loss %{z:.4~g}<extra></extra>",
        legendgroup=method,
    )
    traces = [surface]
    for name, path in paths.items():
        line, marker = (looks[name].colour, looks[name].colour) if method is None else ("#101010", _ORANGE)
        traces += _path(name, path, line, marker)
    axes = {
        axis: {
            "title": f"{name} component ({share:.0%} of the variance)",
            "showgrid": False,
            "range": [recorded[axis[0]][0], recorded[axis[0]][-1]],
        }
        for axis, name, share in zip(("xaxis", "yaxis"), ("First", "Second"), recorded["explained"], strict=True)
    }
    return framed(traces, 460, **axes, hovermode="closest")


def _log(loss: float) -> float:
    return math.log10(max(loss, 1e-12))


def _panel(name: str, entry: Entry, axis: str, low: float, high: float) -> list[go.Contour | go.Scatter]:
    accuracy = f", accuracy {100 * entry['accuracy']:.1f} %" if "accuracy" in entry else ""
    common: dict[str, Any] = {"xaxis": f"x{axis}", "yaxis": f"y{axis}", "legendgroup": name, "name": html.escape(name)}
    surface = go.Contour(
        x=entry["x"],
        y=entry["y"],
        z=[[None if value is None else _log(value) for value in line] for line in entry["surface"]],
        customdata=entry["surface"],
        coloraxis="coloraxis",
        contours={"start": low, "end": high, "size": (high - low) / LEVELS},
        line=_CONTOUR,
        hovertemplate="loss %{customdata:.4~g}<extra>%{fullData.name}</extra>",
        **common,
    )
    model = go.Scatter(
        x=[0],
        y=[0],
        mode="markers",
        marker={"size": 10, "color": _ORANGE, "line": {"width": 1.5, "color": "#ffffff"}},
        hovertemplate=f"the model: loss {entry['loss']:.4g}{accuracy}<extra></extra>",
        **common,
    )
    return [surface, model]


def _interval(k: int, count: int, gap: float) -> list[float]:
    """Return the k-th of `count` equal intervals of [0, 1], with gaps between them."""
    width = (1 - gap * (count - 1)) / count
    return [k * (width + gap), min(1.0, k * (width + gap) + width)]


def _path(method: str, recorded: Entry, line: str, marker: str) -> list[go.Scatter]:
    """Draw a path with its points, from a circle to a star, on a white outline so that it is visible on any background."""
    x, y = zip(*recorded["points"], strict=True)
    common: dict[str, Any] = {"legendgroup": method, "showlegend": False}
    outline = go.Scatter(x=x, y=y, mode="lines", line={"color": "#ffffff", "width": 5}, hoverinfo="skip", **common)
    middle = len(x) - 2
    path = go.Scatter(
        x=x,
        y=y,
        customdata=list(zip(recorded["rounds"], recorded["losses"], strict=True)),
        mode="lines+markers",
        name=html.escape(method),
        line={"color": line, "width": 1.5},
        marker={
            "size": [13, *[7] * middle, 13], "symbol": ["circle", *["circle"] * middle, "star"], "color": marker,
            "line": {"width": 1.5, "color": "#ffffff"},
        },
        hovertemplate="round %{customdata[0]}, loss %{customdata[1]:.4~g}<extra>%{fullData.name}</extra>",
        **common,
    )  # fmt: skip
    return [outline, path]
