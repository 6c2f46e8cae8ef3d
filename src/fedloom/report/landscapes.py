"""Loss surfaces as Plotly figures: around final models (FedMR, figure 6), and under the trajectory
of a client's models (FedALA, figure 4).
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedloom.report.figures import SEQUENCE, Style, framed, of_method

LEVELS = 24  # contour lines from the lowest to the highest loss

Entry = Mapping[str, Any]
"""The result of one recorder (`Recorder.result`)."""

_SURFACE: dict[str, Any] = {
    "colorscale": SEQUENCE,
    "reversescale": True,
    "line": {"width": 0.5, "color": "rgba(255,255,255,0.5)"},
}
_BAR = {"title": {"text": "Loss"}, "thickness": 12, "outlinewidth": 0}
_EDGE = {"width": 1.5, "color": "#ffffff"}


def landscape(method: str, entry: Entry, scale: Sequence[Entry]) -> go.Figure:
    """Draw a result of the recorder `landscape` with contour lines, on a logarithmic scale.

    Args:
        method: Name of the method, for the label.
        entry: The result, with losses `[points, points]`.
        scale: Results that share the scale; their lowest and highest loss bound it.

    Returns:
        The figure. The model is at the origin; axes are in filter norms.
    """
    losses = [
        value for other in scale for line in other["surface"] for value in line if value is not None
    ] or [1.0]
    low, high = _log(min(losses)), _log(max(losses))
    high = max(high, low + 1e-3)
    ticks = np.linspace(low, high, 5)
    common = of_method(method)
    surface = go.Contour(
        x=entry["x"],
        y=entry["y"],
        z=[[None if value is None else _log(value) for value in line] for line in entry["surface"]],
        customdata=entry["surface"],
        zmin=low,
        zmax=high,
        contours={"start": low, "end": high, "size": (high - low) / LEVELS},
        colorbar={**_BAR, "tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks]},
        hovertemplate="loss %{customdata:.4~g}<extra>%{fullData.name}</extra>",
        **_SURFACE,
        **common,
    )
    accuracy = f", accuracy {100 * entry['accuracy']:.1f} %" if "accuracy" in entry else ""
    model = go.Scatter(
        x=[0],
        y=[0],
        mode="markers",
        marker={"size": 10, "color": "#d55e00", "line": _EDGE},
        hovertemplate=f"the model: loss {entry['loss']:.4g}{accuracy}<extra></extra>",
        **common,
    )
    edge = {"showgrid": False, "constrain": "domain", "range": [entry["x"][0], entry["x"][-1]]}
    return framed(
        [surface, model],
        440,
        xaxis={**edge, "title": "First direction"},
        yaxis={**edge, "title": "Second direction", "scaleanchor": "x"},
        hovermode="closest",
        showlegend=False,
    )


def cross_sections(entries: Mapping[str, Entry], looks: Mapping[str, Style]) -> go.Figure:
    """Draw the loss along both directions of a landscape, through the model.

    The first direction is solid, the second dotted.

    Args:
        entries: Results of the recorder `landscape` by method.
        looks: Styles by method.

    Returns:
        The figure, with two lines for each method.
    """
    traces = []
    for name, entry in entries.items():
        middle = len(entry["x"]) // 2
        cuts = entry["surface"][middle], [line[middle] for line in entry["surface"]]
        for direction, dash, values in zip(
            ("first", "second"), ("solid", "dot"), cuts, strict=True
        ):
            line = {"color": looks[name].colour, "width": 2.5, "dash": dash}
            cut = go.Scatter(
                x=entry["x"],
                y=values,
                mode="lines",
                line=line,
                hovertemplate="%{y:.4~g} at %{x:.3~g}<extra>%{fullData.name}</extra>",
                name=f"{html.escape(name)}, {direction}",
            )
            traces.append(cut.update(legendgroup=name))
    return framed(
        traces,
        380,
        xaxis={"title": "Distance from the model, in filter norms"},
        yaxis={"title": "Loss", "rangemode": "tozero"},
        hovermode="closest",
    )


def trajectories(
    surface: Entry, paths: Mapping[str, Entry], looks: Mapping[str, Style]
) -> go.Figure:
    """Draw the trajectories of one client's models over its local loss.

    The plane is spanned by the principal components of the models.

    Args:
        surface: The losses `[points, points]` over the plane, and the explained share of the
            variance.
        paths: Points of the models in the plane by method.
        looks: Styles by method.

    Returns:
        The figure.
    """
    contour = go.Contour(
        x=surface["x"],
        y=surface["y"],
        z=surface["surface"],
        ncontours=LEVELS,
        colorbar=_BAR,
        hovertemplate="loss %{z:.4~g}<extra></extra>",
        legendgroup=next(iter(paths)) if len(paths) == 1 else None,
        **_SURFACE,
    )
    traces = [
        contour,
        *(trace for name, path in paths.items() for trace in _path(name, path, looks[name].colour)),
    ]
    axes = {
        axis: {
            "title": f"{name} component ({share:.0%} of the variance)",
            "showgrid": False,
            "range": [surface[axis[0]][0], surface[axis[0]][-1]],
        }
        for axis, name, share in zip(
            ("xaxis", "yaxis"), ("First", "Second"), surface["explained"], strict=True
        )
    }
    return framed(traces, 460, **axes, hovermode="closest")


def _log(loss: float) -> float:
    return math.log10(max(loss, 1e-12))


def _path(method: str, recorded: Entry, colour: str) -> list[go.Scatter]:
    """Draw a path with its points, from a circle to a star, on a white outline so that it is
    visible on any background.
    """
    x, y = zip(*recorded["points"], strict=True)
    common: dict[str, Any] = {"x": x, "y": y, "legendgroup": method, "showlegend": False}
    outline = go.Scatter(
        mode="lines", line={"color": "#ffffff", "width": 5}, hoverinfo="skip", **common
    )
    middle = len(x) - 2
    path = go.Scatter(
        customdata=list(zip(recorded["rounds"], recorded["losses"], strict=True)),
        mode="lines+markers",
        name=html.escape(method),
        line={"color": colour, "width": 1.5},
        marker={
            "size": [13, *[7] * middle, 13],
            "symbol": ["circle", *["circle"] * middle, "star"],
            "color": colour,
            "line": _EDGE,
        },
        hovertemplate="round %{customdata[0]}, loss "
        "%{customdata[1]:.4~g}<extra>%{fullData.name}</extra>",
        **common,
    )
    return [outline, path]
