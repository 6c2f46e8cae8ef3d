"""Figures of whole models: how alike they are, how they do against their aggregate, and the loss around the final one."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedloom.report.figures import SHARES, Style, framed, learning_curves, pale, title_of
from fedloom.report.summary import RunSummary

SHOWN = 10
"""Local models of a method that are drawn as lines of their own."""

LEVELS = 24
"""Contour lines from the lowest to the highest loss of all landscapes of a figure."""

COLUMNS = 3
"""Panels side by side; more go below."""

SCALE = "Viridis"

Entry = Mapping[str, Any]
"""What one recorder found (`Recorder.result`)."""


def of_kind(run: RunSummary, kind: str) -> Entry | None:
    """What the run's recorder of this kind found, or None."""
    return next((one for one in run.recorded if one["kind"] == kind), None)


def similarity_curves(runs: Sequence[RunSummary]) -> go.Figure:
    """Mean cosine similarity over the rounds, with a band of ± one standard deviation over seeds: solid lines for the models
    that the clients uploaded, dotted ones for the pool of methods that keep one (recorder `similarity`)."""
    return framed(
        _curves(runs, "similarity", {"uploaded": ("", "solid"), "pool": (", pool", "dot")}, "pool_cosine"),
        380,
        xaxis={"title": "Round", "rangemode": "tozero"},
        yaxis={"title": "Mean cosine similarity", "hoverformat": ".5~g"},
        hovermode="closest",
    )


def memorisation_curves(runs: Sequence[RunSummary]) -> go.Figure:
    """Accuracy of the global model over the rounds, with a band of ± one standard deviation over seeds (recorder
    `memorisation`): on training samples with right labels (solid), on those with wrong labels by their true label (dashed) and
    by their wrong one (dotted)."""
    curves = {
        "right": (", right", "solid"),
        "corrected": (", wrong, true label", "dash"),
        "memorised": (", wrong, as given", "dot"),
    }
    return framed(
        _curves(runs, "memorisation", curves, "accuracy"),
        380,
        xaxis={"title": "Round", "rangemode": "tozero"},
        yaxis={"title": "Share of training samples", **SHARES},
        hovermode="closest",
    )


def local_models(
    method: str, recorded: Entry, style: Style, measure: str = "accuracy", ends: Sequence[float] | None = None
) -> go.Figure:
    """Each uploaded model (thin) and the global model made of them (thick), on the test set, over the rounds.

    `recorded` is of the recorder `aggregate`, `measure` its `accuracy` or `loss`, `ends` the ends of the vertical axis.
    """
    rounds, share = recorded["rounds"], measure == "accuracy"
    form = ".1%" if share else ".4~g"
    common: dict[str, Any] = {"x": rounds, "legendgroup": method, "connectgaps": True}
    thin = [
        go.Scatter(
            y=values,
            mode="lines+markers",
            name=f"model {slot + 1}",
            line={"color": pale(style.colour, 0.35), "width": 1},
            marker={"size": 4},
            hovertemplate=f"model {slot + 1}, round %{{x}}: %{{y:{form}}}<extra></extra>",
            showlegend=False,
            **common,
        )
        for slot, values in zip(recorded["slots"][:SHOWN], recorded["models"][measure], strict=False)
    ]
    thick = go.Scatter(
        y=recorded["global"][measure],
        mode="lines+markers",
        name=f"global model of {html.escape(method)}",
        line={"color": style.colour, "width": 3.5},
        marker={"size": 7},
        hovertemplate=f"global model, round %{{x}}: %{{y:{form}}}<extra></extra>",
        **common,
    )
    up = {"title": title_of(measure), **(SHARES if share else {})}
    return framed(
        [*thin, thick],
        340,
        xaxis={"title": "Round", "rangemode": "tozero"},
        yaxis=up | ({} if ends is None else {"range": list(ends)}),
        hovermode="closest",
    )


def common_ends(found: Sequence[Entry], measure: str) -> tuple[float, float]:
    """The ends of a vertical axis on which all local and global models of these records find room."""
    values = [
        value
        for one in found
        for line in (*one["models"][measure], one["global"][measure])
        for value in line
        if value is not None
    ]
    low, high = min(values, default=0.0), max(values, default=1.0)
    beyond = 0.05 * ((high - low) or 1.0)
    return low - beyond, high + beyond


def landscapes(found: Mapping[str, Entry], of: Sequence[Entry] | None = None) -> go.Figure:
    """Loss landscapes side by side, a panel a name, with the same axes, contour lines and colours.

    `found` are results of the recorder `landscape` by what stands above each; colours and lines go by the logarithm of the
    loss and reach from the lowest to the highest loss of all entries in `of`, by default those that are drawn.
    """
    low, high = _extent(list(found.values() if of is None else of))
    traces: list[go.Contour | go.Scatter] = []
    layout: dict[str, Any] = {"annotations": []}
    columns, rows = min(COLUMNS, len(found)), math.ceil(len(found) / COLUMNS)
    for k, (name, one) in enumerate(found.items()):
        axis = "" if not k else str(k + 1)
        traces += _panel(name, one, axis, low, high)
        across, up = _share(k % columns, columns, 0.07), _share(rows - 1 - k // columns, rows, 0.16)
        edge = {"showgrid": False, "constrain": "domain", "range": [one["x"][0], one["x"][-1]]}
        layout[f"xaxis{axis}"] = {**edge, "title": "First direction", "domain": across, "anchor": f"y{axis}"}
        beside = {"title": "" if k % columns else "Second direction", "domain": up, "anchor": f"x{axis}"}
        layout[f"yaxis{axis}"] = {**edge, **beside, "scaleanchor": f"x{axis}", "scaleratio": 1}
        if len(found) > 1:
            layout["annotations"].append(_above(name, sum(across) / 2, up[1]))
    ticks = _log_ticks(low, high)
    bar = {"title": {"text": "Loss"}, "thickness": 12, "outlinewidth": 0}
    layout["coloraxis"] = {
        "colorscale": SCALE, "reversescale": True, "cmin": low, "cmax": high,
        "colorbar": {**bar, "tickvals": [math.log10(tick) for tick in ticks], "ticktext": [f"{tick:g}" for tick in ticks]},
    }  # fmt: skip
    return framed(traces, 440, hovermode="closest", showlegend=False, **layout)


def cross_sections(found: Mapping[str, Entry], looks: Mapping[str, Style]) -> go.Figure:
    """Landscapes by method, cut through the model: the loss along the first direction (solid) and the second (dotted)."""
    traces = []
    for name, one in found.items():
        middle = len(one["x"]) // 2
        cuts = (
            ("first", "solid", one["surface"][middle]),
            ("second", "dot", [line[middle] for line in one["surface"]]),
        )
        for direction, dash, values in cuts:
            traces.append(
                go.Scatter(
                    x=one["x"],
                    y=values,
                    mode="lines",
                    line={"color": looks[name].colour, "width": 2.5, "dash": dash},
                    name=f"{html.escape(name)}, {direction}",
                    legendgroup=name,
                    hovertemplate="%{y:.4~g} at %{x:.3~g}<extra>%{fullData.name}</extra>",
                )
            )
    return framed(
        traces,
        380,
        xaxis={"title": "Distance from the model, in the length of its filters"},
        yaxis={"title": "Loss", "rangemode": "tozero"},
        hovermode="closest",
    )


def _curves(
    runs: Sequence[RunSummary], kind: str, lines: Mapping[str, tuple[str, str]], measure: str
) -> list[go.Scatter]:
    """What the recorder of this `kind` found, drawn as curves of the `measure`; `lines` gives for each of its keys what follows
    the method's name, and the dash."""
    traces: list[go.Scatter] = []
    for key, (ending, dash) in lines.items():
        figure = learning_curves(_as_records(runs, kind, key, measure), measure)
        for trace in figure.data:
            if ending and trace.hoverinfo != "skip":
                trace.update(name=f"{trace.name}{ending}", line={"dash": dash}, mode="lines")
        traces += figure.data
    return traces


def _as_records(runs: Sequence[RunSummary], kind: str, key: str, measure: str) -> list[RunSummary]:
    """The runs as if all their records were `measure`, with the values that the recorder of this `kind` has under `key`."""
    found = []
    for run in runs:
        one = of_kind(run, kind) or {}
        pairs = zip(one.get("rounds", ()), one.get(key, ()), strict=False)
        found.append(replace(run, records=[{"round": number, measure: value} for number, value in pairs], timings=[]))
    return found


def _panel(name: str, one: Entry, axis: str, low: float, high: float) -> list[go.Contour | go.Scatter]:
    heights = [[None if value is None else math.log10(max(value, 1e-12)) for value in line] for line in one["surface"]]
    common: dict[str, Any] = {"xaxis": f"x{axis}", "yaxis": f"y{axis}", "legendgroup": name, "name": html.escape(name)}
    surface = go.Contour(
        x=one["x"],
        y=one["y"],
        z=heights,
        customdata=one["surface"],
        coloraxis="coloraxis",
        contours={"start": low, "end": high, "size": (high - low) / LEVELS},
        line={"width": 0.5, "color": "rgba(255,255,255,0.5)"},
        hovertemplate="loss %{customdata:.4~g}<extra>%{fullData.name}</extra>",
        **common,
    )
    model = go.Scatter(
        x=[0],
        y=[0],
        mode="markers",
        marker={"size": 10, "color": "#d55e00", "line": {"width": 1.5, "color": "#ffffff"}},
        hovertemplate=f"the model: loss {one['loss']:.4g}, accuracy {100 * one['accuracy']:.1f} %<extra></extra>",
        **common,
    )
    return [surface, model]


def _share(k: int, count: int, gap: float) -> list[float]:
    """Where the k-th of `count` equal parts of [0, 1] begins and ends, with gaps between them."""
    width = (1 - gap * (count - 1)) / count
    return [k * (width + gap), min(1.0, k * (width + gap) + width)]


def _above(name: str, x: float, y: float) -> dict[str, Any]:
    return {
        "text": html.escape(name), "x": x, "y": y, "xref": "paper", "yref": "paper", "yanchor": "bottom",
        "showarrow": False, "font": {"size": 14},
    }  # fmt: skip


def _extent(found: Sequence[Entry]) -> tuple[float, float]:
    """The logarithms (to base 10) of the lowest and the highest loss; never the same."""
    values = [value for one in found for line in one["surface"] for value in line if value is not None] or [1.0]
    low, high = math.log10(max(min(values), 1e-12)), math.log10(max(*values, 1e-12))
    return low, max(high, low + 1e-3)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round losses for a logarithmic colour bar, as few digits as give four ticks; evenly spaced where none do."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
        if len(ticks) >= 4:
            return ticks
    return [float(f"{10**place:.3g}") for place in np.linspace(low, high, 5)]
