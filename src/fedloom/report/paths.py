"""The ways of a client's models over the surface of its loss, as Plotly figures (FedALA, figure 4)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from fedloom.report.figures import Style, framed

SEQUENCE = "Viridis"
"""Colours from early to late, and from low to high; told apart by people with any common colour blindness."""

_LINE = "#d55e00"


def trajectory_path(method: str, recorded: Mapping[str, Any]) -> go.Figure:
    """The path of a client's models over its local loss in the plane of their two principal components; without a plane, the
    loss of the models over the rounds."""
    if "points" in recorded:
        return _over([_surface(recorded, method), *_path(method, recorded, "#101010")], recorded)
    line = go.Scatter(
        x=recorded["rounds"],
        y=recorded["losses"],
        mode="lines+markers",
        line={"color": _LINE},
        legendgroup=method,
        showlegend=False,
    )
    return framed([line], 380, xaxis={"title": "Round"}, yaxis={"title": "Training loss"})


def trajectories(recorded: Mapping[str, Any], looks: Mapping[str, Style]) -> go.Figure:
    """The paths of one client's models with several methods, in the methods' colours, over one surface of its loss."""
    paths = [
        trace
        for method, one in recorded["methods"].items()
        for trace in _path(method, one, looks[method].colour, looks[method].colour)
    ]
    return _over([_surface(recorded), *paths], recorded)


def _surface(recorded: Mapping[str, Any], method: str | None = None) -> go.Contour:
    return go.Contour(
        x=recorded["x"],
        y=recorded["y"],
        z=recorded["surface"],
        colorscale=SEQUENCE,
        reversescale=True,
        ncontours=24,
        line={"width": 0.5, "color": "rgba(255,255,255,0.5)"},
        colorbar={"title": {"text": "Loss"}, "thickness": 12, "outlinewidth": 0},
        hovertemplate="loss %{z:.4~g}<extra></extra>",
        legendgroup=method,
    )


def _path(method: str, recorded: Mapping[str, Any], line: str, marker: str = _LINE) -> list[go.Scatter]:
    """A path with its points, from a circle to a star; below it a light line, so that it is seen on high and on low ground."""
    x, y = zip(*recorded["points"], strict=True)
    common: dict[str, Any] = {"legendgroup": method, "showlegend": False}
    halo = go.Scatter(x=x, y=y, mode="lines", line={"color": "#ffffff", "width": 5}, hoverinfo="skip", **common)
    path = go.Scatter(
        x=x,
        y=y,
        customdata=list(zip(recorded["rounds"], recorded["losses"], strict=True)),
        mode="lines+markers",
        name=html.escape(method),
        line={"color": line, "width": 1.5},
        marker={"size": 7, "color": marker, "line": {"width": 1, "color": "#ffffff"}},
        hovertemplate="round %{customdata[0]}, loss %{customdata[1]:.4~g}<extra>%{fullData.name}</extra>",
        **common,
    )
    ends = go.Scatter(
        x=[x[0], x[-1]],
        y=[y[0], y[-1]],
        mode="markers",
        marker={"size": 13, "symbol": ["circle", "star"], "color": marker, "line": {"width": 1.5, "color": "#ffffff"}},
        hoverinfo="skip",
        **common,
    )
    return [halo, path, ends]


def _over(traces: Sequence[go.Contour | go.Scatter], recorded: Mapping[str, Any]) -> go.Figure:
    first, second = (
        f"{name} component ({share:.0%} of the variance)"
        for name, share in zip(("First", "Second"), recorded["explained"], strict=True)
    )
    return framed(
        list(traces),
        460,
        xaxis={"title": first, "showgrid": False, "range": [recorded["x"][0], recorded["x"][-1]]},
        yaxis={"title": second, "showgrid": False, "range": [recorded["y"][0], recorded["y"][-1]]},
        hovermode="closest",
    )
