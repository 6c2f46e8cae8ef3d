"""The figures of what runs recorded on request (`fedloom.recording`), as Plotly figures."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from fedloom.report.figures import Style, framed, pale, styles
from fedloom.report.models import (
    SHOWN,
    common_ends,
    cross_sections,
    landscapes,
    local_models,
    memorisation_curves,
    of_kind,
    similarity_curves,
)
from fedloom.report.paths import SEQUENCE, trajectories, trajectory_path
from fedloom.report.summary import RunSummary, by_algorithm

ROUNDS = 12
"""Rounds of ALA's learning that are drawn, evenly spaced, the first and the last among them."""

DRAWN = 24
"""Figures of one page at most."""

_EARLY, _LATE = 0.35, 0.88
"""The part of the colours that is seen on white and on near black alike."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its name among those of the runs, its title and what to say below it."""

    name: str
    title: str
    caption: str
    figure: go.Figure


def drawings(runs: Sequence[RunSummary]) -> list[Drawing]:
    """All that the runs recorded, of each method the first seed that recorded anything, up to `DRAWN` figures; similarity
    and memorisation are of all seeds."""
    chosen = [run for group in by_algorithm(runs).values() if (run := _first_recorded(group)) is not None]
    looks = styles(runs)
    found: list[Drawing] = []
    if any(of_kind(run, "objective") for run in chosen):
        found.append(_objectives(chosen, looks))
    if any(of_kind(run, "similarity") for run in runs):
        found.append(_similarity(runs))
    if any(of_kind(run, "memorisation") for run in runs):
        found.append(_memorisation(runs))
    found += [*_local_models(chosen, looks), *_landscapes(runs)]
    joint = [one for run in runs for one in run.recorded if one["kind"] == "trajectories"]
    found += [_trajectories(one, looks) for one in joint]
    shown = {(method, one["client"]) for one in joint for method in one["methods"]}
    for run in chosen:
        for one in run.recorded:
            if one["kind"] == "ala":
                found.append(_blending(run, one, _whose(run, runs)))
            elif one["kind"] == "trajectory" and (run.algorithm, one["client"]) not in shown:
                found.append(_trajectory(run, one, _whose(run, runs)))
    return found[:DRAWN]


def objective_steps(method: str, recorded: Mapping[str, Any], style: Style) -> list[go.Scatter]:
    """The objective before (circles) and after (dots) local training, and the steps between them, round by round."""
    rounds, before, after = recorded["rounds"], recorded["before"], recorded["after"]
    common: dict[str, Any] = {"legendgroup": method, "name": html.escape(method), "showlegend": False}
    steps = go.Scatter(
        x=[place for number in rounds for place in (number, number, None)],
        y=[value for pair in zip(before, after, strict=True) for value in (*pair, None)],
        mode="lines",
        line={"color": pale(style.colour, 0.4), "width": 1.5},
        hoverinfo="skip",
        **common,
    )
    ends = [
        go.Scatter(
            x=rounds,
            y=values,
            mode="lines+markers",
            line={"color": pale(style.colour, 0.55), "width": 1, "dash": dash},
            marker={"symbol": symbol, "size": 8, "color": style.colour, "line": {"width": 2, "color": style.colour}},
            hovertemplate=f"round %{{x}}, {when} local training: %{{y:.4~g}}<extra>%{{fullData.name}}</extra>",
            **common,
        )
        for values, when, symbol, dash in (
            (before, "before", "circle-open", "dot"),
            (after, "after", "circle", "solid"),
        )
    ]
    return [steps, *ends]


def blending_losses(method: str, recorded: Mapping[str, Any]) -> go.Figure:
    """The loss of each epoch of ALA's learning, a line a round from early to late; up to `ROUNDS` rounds."""
    rounds, losses = recorded["rounds"], recorded["losses"]
    shown = sorted({int(k) for k in np.linspace(0, len(rounds) - 1, min(len(rounds), ROUNDS)).round()})
    span = max(1, rounds[shown[-1]] - rounds[shown[0]])
    colours = sample_colorscale(
        SEQUENCE, [_EARLY + (_LATE - _EARLY) * (rounds[k] - rounds[shown[0]]) / span for k in shown]
    )
    lines = [
        go.Scatter(
            x=list(range(1, len(losses[k]) + 1)),
            y=losses[k],
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 6},
            hovertemplate=f"round {rounds[k]}, epoch %{{x}}: %{{y:.4~g}}<extra></extra>",
            name=f"round {rounds[k]}",
            legendgroup=method,
        )
        for k, colour in zip(shown, colours, strict=True)
    ]
    scale = _scale_of_rounds(rounds[shown[0]], rounds[shown[-1]], method)
    return framed(
        [*lines, *scale],
        380,
        xaxis={"title": "Epoch of learning the weights", "dtick": 1 if max(map(len, losses)) <= 12 else None},
        yaxis={"title": "Training loss"},
        hovermode="closest",
    )


def _first_recorded(runs: Sequence[RunSummary]) -> RunSummary | None:
    return next((run for run in runs if run.recorded), None)


def _objectives(runs: Sequence[RunSummary], looks: Mapping[str, Style]) -> Drawing:
    traces = [
        trace
        for run in runs
        for one in run.recorded
        if one["kind"] == "objective"
        for trace in objective_steps(run.algorithm, one, looks[run.algorithm])
    ]
    figure = framed(traces, 380, xaxis={"title": "Round"}, yaxis={"title": "Training objective"}, hovermode="closest")
    caption = (
        "over the round's clients, weighted by samples: circles, of the models received, before local training; "
        "dots, of the models uploaded."
    )
    return Drawing("objective", "Training objective", f"{caption} {_seeds(runs)}", figure)


def _similarity(runs: Sequence[RunSummary]) -> Drawing:
    pools = any("pool" in (of_kind(run, "similarity") or {}) for run in runs)
    dotted = "; dotted, of the pool that the server keeps" if pools else ""
    band = " Mean over seeds, band ± one standard deviation." if len({run.seed for run in runs}) > 1 else ""
    caption = f"over all pairs of models that the clients uploaded in a round{dotted}.{band}"
    return Drawing("similarity", "Mean cosine similarity", caption, similarity_curves(runs))


def _memorisation(runs: Sequence[RunSummary]) -> Drawing:
    known = [one for run in runs if (one := of_kind(run, "memorisation")) is not None]
    wrong = max(one["samples"][1] for one in known)
    dashes = (
        f" solid, those with right labels; of the up to {wrong:,} with wrong ones, dashed, the share that is classified as is "
        "true, dotted, as given (memorised)."
    )
    band = " Mean over seeds, band ± one standard deviation." if len({run.seed for run in runs}) > 1 else ""
    caption = (
        f"of the global model on training samples{';' + dashes if wrong else ', all of which have right labels.'}{band}"
    )
    return Drawing("memorisation", "Right and wrong labels", caption, memorisation_curves(runs))


def _local_models(chosen: Sequence[RunSummary], looks: Mapping[str, Style]) -> list[Drawing]:
    """Accuracy of all methods, then loss, each at one scale."""
    known = {run.algorithm: (run, one) for run in chosen if (one := of_kind(run, "aggregate")) is not None}
    found = []
    for measure in ("accuracy", "loss") if known else ():
        ends = common_ends([one for _, one in known.values()], measure)
        for name, (run, one) in known.items():
            drawn = min(SHOWN, len(one["slots"]))
            some = f"the first {drawn} of {len(one['slots'])} models" if drawn < len(one["slots"]) else "models"
            caption = (
                f"of the {some} that the clients of {name} upload, thin, and of the global model made of them, thick."
            )
            figure = local_models(name, one, looks[name], measure, ends)
            title = f"Local models: test {measure}"
            found.append(Drawing(f"local-{measure}-{name}", title, f"{caption} Seed {run.seed}.", figure))
    return found


def side_by_side(runs: Sequence[RunSummary]) -> Drawing | None:
    """The landscapes of all methods in one figure; None unless there are two or more."""
    known = _with_landscape(runs)
    if len(known) < 2:
        return None
    caption = f"around the final models, {_of_landscape(known)}"
    figure = landscapes({name: one for name, (_, one) in known.items()})
    return Drawing("landscapes", "Loss landscapes", caption, figure)


def _landscapes(runs: Sequence[RunSummary]) -> list[Drawing]:
    """A landscape a method, all with the same contour lines, and the cuts through them."""
    known = _with_landscape(runs)
    entries = [one for _, one in known.values()]
    found = [
        Drawing(
            f"landscape-{name}",
            "Loss landscape",
            f"around the final model of {name}, {_of_landscape(known)}",
            landscapes({name: one}, entries),
        )
        for name, (_, one) in known.items()
    ]
    if found:
        caption = "cut through the model along the first direction (solid) and the second (dotted)."
        figure = cross_sections({name: one for name, (_, one) in known.items()}, styles(runs))
        found.append(Drawing("landscape-cuts", "Loss landscape", caption, figure))
    return found


def _with_landscape(runs: Sequence[RunSummary]) -> dict[str, tuple[RunSummary, Mapping[str, Any]]]:
    """Of each method the first run with a landscape that can be set beside the first of all: of the same points and data."""
    found: dict[str, tuple[RunSummary, Mapping[str, Any]]] = {}
    alike: list[list[Any]] = []
    for run in runs:
        if (one := of_kind(run, "landscape")) is not None:
            alike.append([one["x"], one["data"], one["directions"]])
            if alike[-1] == alike[0]:
                found.setdefault(run.algorithm, (run, one))
    return found


def _of_landscape(known: Mapping[str, tuple[RunSummary, Mapping[str, Any]]]) -> str:
    runs, entries = [run for run, _ in known.values()], [one for _, one in known.values()]
    samples = f"{entries[0]['samples']:,} {'test' if entries[0]['data'] == 'test' else 'training'} samples"
    alike = "" if len(known) < 2 else " Directions, axes and contour lines are the same for all methods."
    return f"on {samples}, in two random directions scaled filter by filter to the model.{alike} {_seeds(runs)}"


def _whose(run: RunSummary, runs: Sequence[RunSummary]) -> str:
    return f" {run.algorithm}, seed {run.seed}." if len(by_algorithm(runs)) > 1 else f" Seed {run.seed}."


def _seeds(runs: Sequence[RunSummary]) -> str:
    seeds = sorted({run.seed for run in runs})
    return f"Seed {', '.join(map(str, seeds))}." if seeds else ""


def _blending(run: RunSummary, one: Mapping[str, Any], whose: str) -> Drawing:
    caption = f"of client {one['client']} over the epochs, a line a round.{whose}"
    name = f"ala-{one['client']}-{run.algorithm}"
    return Drawing(name, "Loss while learning ALA's weights", caption, blending_losses(run.algorithm, one))


def _trajectory(run: RunSummary, one: Mapping[str, Any], whose: str) -> Drawing:
    over = (
        "over its training loss in the plane of their two principal components"
        if "points" in one
        else "span no plane; their training loss"
    )
    first, last = one["rounds"][0], one["rounds"][-1]
    span = f"from round {first} (circle) to {last} (star)" if "points" in one else f"rounds {first} to {last}"
    caption = f"{over}, {span}.{whose}"
    name = f"trajectory-{one['client']}-{run.algorithm}"
    return Drawing(name, f"Models of client {one['client']}", caption, trajectory_path(run.algorithm, one))


def _trajectories(one: Mapping[str, Any], looks: Mapping[str, Style]) -> Drawing:
    caption = (
        f"with {', '.join(one['methods'])} over its training loss in the plane of the two principal components of all, "
        f"each from its first recorded round (circle) to its last (star). Seed {one['seed']}."
    )
    title = f"Models of client {one['client']}"
    return Drawing(f"trajectories-{one['client']}", title, caption, trajectories(one, looks))


def _scale_of_rounds(first: int, last: int, method: str) -> list[go.Scatter]:
    """A bar that says which colour is which round; it belongs to a trace without points."""
    if first == last:
        return []
    marker = {
        "color": [first],
        "cmin": first,
        "cmax": last,
        "colorscale": sample_colorscale(SEQUENCE, np.linspace(_EARLY, _LATE, 9).tolist()),
        "colorbar": {"title": {"text": "Round"}, "thickness": 12, "outlinewidth": 0},
        "showscale": True,
    }
    return [
        go.Scatter(
            x=[None], y=[None], mode="markers", marker=marker, hoverinfo="skip", showlegend=False, legendgroup=method
        )
    ]
