"""The figures of what runs recorded on request (`fedloom.recording`)."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from fedloom.objectives import ACCURACY, Metric
from fedloom.report.curves import is_share, learning_curves, title_of
from fedloom.report.figures import SEQUENCE, SHARES, ReportFigure, Style, framed, pale, styles
from fedloom.report.landscapes import Entry, cross_sections, landscapes, trajectories, trajectory
from fedloom.report.summary import RunSummary, by_algorithm

LOCAL_MODELS = 10
"""Local models of a method that are drawn as lines of their own."""

ROUNDS = 12
"""Rounds of ALA's learning that are drawn, evenly spaced, the first and the last among them."""

LIMIT = 24
"""Figures of recorded values on one page at most."""

_EARLY, _LATE = 0.35, 0.88
"""The part of the colour scale that is visible on white and on near black alike."""

Chosen = Sequence[tuple[RunSummary, Entry]]


def recorded_figures(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """All that the runs recorded, for each method of the first seed that recorded anything, up to `LIMIT` figures; similarity
    and memorisation are over all seeds."""
    groups = by_algorithm(runs).values()
    chosen = [run for group in groups if (run := next((one for one in group if one.recorded), None)) is not None]
    looks = styles(runs)
    found = [
        *_objectives(chosen, looks),
        *_similarity(runs),
        *memorisation_figures(runs),
        *_local_models(chosen, looks),
        *_landscapes(runs, looks),
    ]
    joint = [one for run in runs for one in run.recorded if one["kind"] == "trajectories"]
    found += [_trajectories(one, looks) for one in joint]
    shown = {(method, one["client"]) for one in joint for method in one["methods"]}
    for run in chosen:
        of = f" {run.algorithm}, seed {run.seed}." if len(groups) > 1 else f" Seed {run.seed}."
        for one in run.recorded:
            if one["kind"] == "ala":
                found.append(_ala_losses(run.algorithm, one, of))
            elif one["kind"] == "trajectory" and (run.algorithm, one["client"]) not in shown:
                found.append(_trajectory(run.algorithm, one, of))
    return found[:LIMIT]


def of_kind(runs: Sequence[RunSummary], kind: str) -> list[tuple[RunSummary, Entry]]:
    """The runs that have a record of this kind, each with its first."""
    found = ((run, next((one for one in run.recorded if one["kind"] == kind), None)) for run in runs)
    return [(run, one) for run, one in found if one is not None]


def joint_landscapes(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """The landscapes of all methods in one figure; empty unless there are two or more."""
    known = _with_landscape(runs)
    caption = f"around the final models, {_landscape_caption(known)}" if known else ""
    figure = landscapes({run.algorithm: one for run, one in known}) if len(known) > 1 else None
    return [] if figure is None else [ReportFigure("landscapes", "Loss landscapes", caption, {"": figure})]


def similarity_curves(runs: Sequence[RunSummary]) -> go.Figure:
    """Mean cosine similarity over the rounds, with a band of ± one standard deviation over seeds: solid lines for the models
    that the clients uploaded, dotted ones for the pool of methods that keep one (recorder `similarity`)."""
    lines = {"uploaded": ("", "solid"), "pool": (", pool", "dot")}
    yaxis = {"title": "Mean cosine similarity", "hoverformat": ".5~g"}
    return _curves(runs, "similarity", lines, "pool_cosine", yaxis)


def memorisation_curves(runs: Sequence[RunSummary]) -> go.Figure:
    """Accuracy of the global model over the rounds, with a band of ± one standard deviation over seeds (recorder
    `memorisation`): on training samples with right labels (solid), on those with wrong labels by their true label (dashed) and
    by their wrong one (dotted)."""
    lines = {
        "right": (", right", "solid"),
        "corrected": (", wrong, true label", "dash"),
        "memorised": (", wrong, as given", "dot"),
    }
    return _curves(runs, "memorisation", lines, "accuracy", {"title": "Share of training samples", **SHARES})


def local_models(
    method: str,
    recorded: Entry,
    style: Style,
    measure: str = "accuracy",
    limits: Sequence[float] | None = None,
    metric: Metric = ACCURACY,
) -> go.Figure:
    """Each uploaded model (thin) and the global model aggregated from them (thick), on the test set, over the rounds.

    `recorded` is of the recorder `aggregate`, `measure` its `accuracy` or `loss`, `limits` those of the vertical axis.
    """
    share = is_share(measure, metric)
    form = ".1%" if share else ".4~g"
    common: dict[str, Any] = {
        "x": recorded["rounds"], "legendgroup": method, "connectgaps": True, "mode": "lines+markers",
    }  # fmt: skip
    thin = [
        go.Scatter(
            y=values,
            name=f"model {slot + 1}",
            line={"color": pale(style.colour, 0.35), "width": 1},
            marker={"size": 4},
            hovertemplate=f"model {slot + 1}, round %{{x}}: %{{y:{form}}}<extra></extra>",
            showlegend=False,
            **common,
        )
        for slot, values in zip(recorded["slots"][:LOCAL_MODELS], recorded["models"][measure], strict=False)
    ]
    thick = go.Scatter(
        y=recorded["global"][measure],
        name=f"global model of {html.escape(method)}",
        line={"color": style.colour, "width": 3.5},
        marker={"size": 7},
        hovertemplate=f"global model, round %{{x}}: %{{y:{form}}}<extra></extra>",
        **common,
    )
    yaxis = {
        "title": title_of(measure, metric),
        **(SHARES if share else {}),
        **({"range": list(limits)} if limits else {}),
    }
    xaxis = {"title": "Round", "rangemode": "tozero"}
    return framed([*thin, thick], 340, xaxis=xaxis, yaxis=yaxis, hovermode="closest")


def objective_steps(method: str, recorded: Entry, style: Style) -> list[go.Scatter]:
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


def ala_losses(method: str, recorded: Entry) -> go.Figure:
    """The loss of each epoch of ALA's learning, a line a round from early to late; up to `ROUNDS` rounds."""
    rounds, losses = recorded["rounds"], recorded["losses"]
    shown = sorted({int(k) for k in np.linspace(0, len(rounds) - 1, min(len(rounds), ROUNDS)).round()})
    first, last = rounds[shown[0]], rounds[shown[-1]]
    places = [_EARLY + (_LATE - _EARLY) * (rounds[k] - first) / max(1, last - first) for k in shown]
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
        for k, colour in zip(shown, sample_colorscale(SEQUENCE, places), strict=True)
    ]
    xaxis = {"title": "Epoch of learning the weights", "dtick": 1 if max(map(len, losses)) <= 12 else None}
    traces = [*lines, *([] if first == last else [_round_colour_bar(first, last, method)])]
    return framed(traces, 380, xaxis=xaxis, yaxis={"title": "Training loss"}, hovermode="closest")


def _round_colour_bar(first: int, last: int, method: str) -> go.Scatter:
    """A trace without points whose colour bar shows which colour is which round."""
    marker = {
        "color": [first],
        "cmin": first,
        "cmax": last,
        "colorscale": sample_colorscale(SEQUENCE, np.linspace(_EARLY, _LATE, 9).tolist()),
        "colorbar": {"title": {"text": "Round"}, "thickness": 12, "outlinewidth": 0},
        "showscale": True,
    }
    hidden: dict[str, Any] = {"hoverinfo": "skip", "showlegend": False, "legendgroup": method}
    return go.Scatter(x=[None], y=[None], mode="markers", marker=marker, **hidden)


def _curves(
    runs: Sequence[RunSummary], kind: str, lines: Mapping[str, tuple[str, str]], measure: str, yaxis: Mapping[str, Any]
) -> go.Figure:
    """The values of the recorder of this `kind`, drawn as curves of the `measure`; `lines` gives for each of its keys what
    follows the method's name, and the dash."""
    known = {id(run): one for run, one in of_kind(runs, kind)}
    traces: list[go.Scatter] = []
    for key, (ending, dash) in lines.items():
        pairs = [
            zip(one.get("rounds", ()), one.get(key, ()), strict=False)
            for one in (known.get(id(run), {}) for run in runs)
        ]
        alone = [
            replace(run, records=[{"round": number, measure: value} for number, value in found], timings=[])
            for run, found in zip(runs, pairs, strict=True)
        ]  # every run, so that methods keep their colours
        for trace in learning_curves(alone, measure).data:
            if ending and trace.hoverinfo != "skip":
                trace.update(name=f"{trace.name}{ending}", line={"dash": dash}, mode="lines")
            traces.append(trace)
    return framed(traces, 380, xaxis={"title": "Round", "rangemode": "tozero"}, yaxis=yaxis, hovermode="closest")


def _objectives(chosen: Sequence[RunSummary], looks: Mapping[str, Style]) -> Iterator[ReportFigure]:
    known = of_kind(chosen, "objective")
    traces = [
        trace for run, one in known for trace in objective_steps(run.algorithm, one, looks[run.algorithm])
    ]  # fmt: skip
    if traces:
        caption = (
            "over the round's clients, weighted by samples: circles, of the models received, before local training; "
            f"dots, of the models uploaded. {_seeds(chosen)}"
        )
        axes = {"xaxis": {"title": "Round"}, "yaxis": {"title": "Training objective"}}
        figure = framed(traces, 380, **axes, hovermode="closest")
        yield ReportFigure("objective", "Training objective", caption, {"": figure})


def _similarity(runs: Sequence[RunSummary]) -> Iterator[ReportFigure]:
    if known := of_kind(runs, "similarity"):
        dotted = "; dotted, of the pool that the server keeps" if any("pool" in one for _, one in known) else ""
        caption = f"over all pairs of models that the clients uploaded in a round{dotted}.{_band(runs)}"
        yield ReportFigure("similarity", "Mean cosine similarity", caption, {"": similarity_curves(runs)})


def memorisation_figures(runs: Sequence[RunSummary]) -> Iterator[ReportFigure]:
    """What the runs learned of right and of wrong labels, where that was recorded."""
    if known := of_kind(runs, "memorisation"):
        wrong = max(one["samples"][1] for _, one in known)
        lines = (
            f"; solid, those with right labels; of the up to {wrong:,} with wrong ones, the share that is classified by the "
            "true label (dashed) and as given, that is, memorised (dotted)."
        )
        which = lines if wrong else ", all of which have right labels."
        caption = f"of the global model on training samples{which}{_band(runs)}"
        yield ReportFigure("memorisation", "Right and wrong labels", caption, {"": memorisation_curves(runs)})


def _local_models(chosen: Sequence[RunSummary], looks: Mapping[str, Style]) -> Iterator[ReportFigure]:
    """The accuracy of all methods, then the loss, each on one scale."""
    known = of_kind(chosen, "aggregate")
    metric = chosen[0].metric if chosen else ACCURACY
    for measure in dict.fromkeys((metric.name, "loss")):
        lines = [line for _, one in known for line in (*one["models"][measure], one["global"][measure])]
        values = [value for line in lines for value in line if value is not None]
        low, high = min(values, default=0.0), max(values, default=1.0)
        beyond = 0.05 * ((high - low) or 1.0)
        for run, one in known:
            name, count = run.algorithm, len(one["slots"])
            some = f"the first {LOCAL_MODELS} of {count} models" if count > LOCAL_MODELS else "models"
            caption = (
                f"of the {some} that the clients of {name} upload (thin) and of the global model aggregated from them (thick). "
                f"Seed {run.seed}."
            )
            figure = local_models(name, one, looks[name], measure, (low - beyond, high + beyond), metric)
            yield ReportFigure(f"local-{measure}-{name}", f"Local models: test {measure}", caption, {"": figure})


def _landscapes(runs: Sequence[RunSummary], looks: Mapping[str, Style]) -> Iterator[ReportFigure]:
    """A landscape for each method, all with the same contour lines, and the cross-sections through them."""
    known = _with_landscape(runs)
    entries = {run.algorithm: one for run, one in known}
    for name, one in entries.items():
        caption = f"around the final model of {name}, {_landscape_caption(known)}"
        figure = landscapes({name: one}, [*entries.values()])
        yield ReportFigure(f"landscape-{name}", "Loss landscape", caption, {"": figure})
    if known:
        caption = "in cross-section through the model, along the first direction (solid) and the second (dotted)."
        yield ReportFigure("landscape-cuts", "Loss landscape", caption, {"": cross_sections(entries, looks)})


def _with_landscape(runs: Sequence[RunSummary]) -> Chosen:
    """For each method the first run whose landscape is comparable with the first of all: same points, data and directions."""
    known = of_kind(runs, "landscape")
    first: dict[str, tuple[RunSummary, Entry]] = {}
    for run, one in known:
        if all(one[key] == known[0][1][key] for key in ("x", "data", "directions")):
            first.setdefault(run.algorithm, (run, one))
    return [*first.values()]


def _landscape_caption(known: Chosen) -> str:
    one = known[0][1]
    samples = f"{one['samples']:,} {'test' if one['data'] == 'test' else 'training'} samples"
    alike = "" if len(known) < 2 else " Directions, axes and contour lines are the same for all methods."
    seeds = _seeds([run for run, _ in known])
    return f"on {samples}, in two random filter-normalised directions.{alike} {seeds}"


def _ala_losses(method: str, one: Entry, of: str) -> ReportFigure:
    caption = f"of client {one['client']} over the epochs, a line a round.{of}"
    title = "Loss while learning ALA's weights"
    return ReportFigure(f"ala-{one['client']}-{method}", title, caption, {"": ala_losses(method, one)})


def _trajectory(method: str, one: Entry, of: str) -> ReportFigure:
    first, last = one["rounds"][0], one["rounds"][-1]
    caption = f"span no plane; their training loss, rounds {first} to {last}.{of}"
    if "points" in one:
        over = "over its training loss in the plane of their two principal components"
        caption = f"{over}, from round {first} (circle) to {last} (star).{of}"
    name, title = f"trajectory-{one['client']}-{method}", f"Models of client {one['client']}"
    return ReportFigure(name, title, caption, {"": trajectory(method, one)})


def _trajectories(one: Entry, looks: Mapping[str, Style]) -> ReportFigure:
    caption = (
        f"with {', '.join(one['methods'])} over its training loss in the plane of the two principal components of all, "
        f"each from its first recorded round (circle) to its last (star). Seed {one['seed']}."
    )
    title = f"Models of client {one['client']}"
    return ReportFigure(f"trajectories-{one['client']}", title, caption, {"": trajectories(one, looks)})


def _seeds(runs: Sequence[RunSummary]) -> str:
    return f"Seed {', '.join(map(str, sorted({run.seed for run in runs})))}."


def _band(runs: Sequence[RunSummary]) -> str:
    return " Mean over seeds, band ± one standard deviation." if len({run.seed for run in runs}) > 1 else ""
