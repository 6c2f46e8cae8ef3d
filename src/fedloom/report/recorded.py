"""Figures of recorders' results (`fedloom.recording`)."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from fedloom.objectives import ACCURACY, Metric
from fedloom.report.curves import is_share, learning_curves, title_of
from fedloom.report.figures import SEQUENCE, SHARES, ReportFigure, Style, evenly_spaced, framed, pale, styles
from fedloom.report.landscapes import Entry, cross_sections, landscapes, losses_by_round, trajectories
from fedloom.report.summary import RunSummary, by_algorithm

LOCAL_MODELS = 10  # of a method, drawn as lines of their own
ROUNDS = 12  # of ALA's learning that are drawn, evenly spaced, the first and the last among them
LIMIT = 24  # figures of recorded values on one page
EARLY, LATE = 0.35, 0.88  # the part of the colour scale that is visible on white and on near black alike

Recorded = tuple[RunSummary, Entry]
"""A run with the result of one of its recorders."""


def recorded_figures(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """Return the figures of all recorders, for each method of the first seed that recorded anything, up to `LIMIT` figures;
    objectives, similarity and memorisation are over all seeds."""
    groups = by_algorithm(runs).values()
    chosen = [run for group in groups for run in [run for run in group if run.recorded][:1]]
    looks = styles(runs)
    figures = [
        *_objectives(runs),
        *_similarity(runs),
        *memorisation_figures(runs),
        *_local_models(chosen, looks),
        *_landscapes(runs, looks),
    ]
    joint = [entry for run in runs for entry in run.recorded if entry["kind"] == "trajectories"]
    figures += [_trajectories(entry, looks) for entry in joint]
    shown = {(method, entry["client"]) for entry in joint for method in entry["methods"]}
    for run in chosen:
        source = f" {run.algorithm}, seed {run.seed}." if len(groups) > 1 else f" Seed {run.seed}."
        for entry in run.recorded:
            if entry["kind"] == "ala":
                figures.append(_ala_losses(run.algorithm, entry, source))
            elif entry["kind"] == "trajectory" and (run.algorithm, entry["client"]) not in shown:
                figures.append(_trajectory(run.algorithm, entry, source))
    return figures[:LIMIT]


def of_kind(runs: Sequence[RunSummary], kind: str) -> list[Recorded]:
    """Return the runs that have a record of this kind, each with the first of them."""
    entries = ((run, next((entry for entry in run.recorded if entry["kind"] == kind), None)) for run in runs)
    return [(run, entry) for run, entry in entries if entry is not None]


def joint_landscapes(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """Return the landscapes of all methods in one figure; empty unless there are two or more."""
    comparable = _comparable_landscapes(runs)
    if len(comparable) < 2:
        return []
    figure = landscapes({run.algorithm: entry for run, entry in comparable})
    caption = f"around the final models, {_landscape_caption(comparable)}"
    return [ReportFigure.of("landscapes", "Loss landscapes", caption, figure)]


def _draw_local_models(
    method: str, recorded: Entry, style: Style, measure: str, limits: Sequence[float], metric: Metric
) -> go.Figure:
    """Draw a measure of each uploaded model (thin) and of the global model aggregated from them (thick) over the rounds."""
    share = is_share(measure, metric)

    def line(label: str, values: Sequence[float | None], opacity: float, width: float, size: int) -> go.Scatter:
        return go.Scatter(
            x=recorded["rounds"],
            y=values,
            line={"color": pale(style.colour, opacity) if opacity < 1 else style.colour, "width": width},
            marker={"size": size},
            hovertemplate=f"{label}, round %{{x}}: %{{y:{'.1%' if share else '.4~g'}}}<extra></extra>",
            mode="lines+markers",
            connectgaps=True,
            legendgroup=method,
        )

    slots = zip(recorded["slots"][:LOCAL_MODELS], recorded["models"][measure], strict=False)
    labelled = {f"model {slot + 1}": values for slot, values in slots}
    traces = [line(name, values, 0.35, 1, 4).update(name=name, showlegend=False) for name, values in labelled.items()]
    thick = line("global model", recorded["global"][measure], 1, 3.5, 7)
    traces.append(thick.update(name=f"global model of {html.escape(method)}"))
    yaxis = {"title": title_of(measure, metric), **(SHARES if share else {}), "range": list(limits)}
    return framed(traces, 340, xaxis={"title": "Round", "rangemode": "tozero"}, yaxis=yaxis, hovermode="closest")


def _ala_losses(method: str, recorded: Entry, source: str) -> ReportFigure:
    """Draw the loss of each epoch of ALA's learning, a line a round from early to late; up to `ROUNDS` rounds."""
    rounds, losses = recorded["rounds"], recorded["losses"]
    shown = evenly_spaced(len(rounds), ROUNDS)
    low, high = rounds[shown[0]], rounds[shown[-1]]
    shares = [EARLY + (LATE - EARLY) * (rounds[k] - low) / max(1, high - low) for k in shown]
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
        for k, colour in zip(shown, sample_colorscale(SEQUENCE, shares), strict=True)
    ]
    xaxis = {"title": "Epoch of learning the weights", "dtick": 1 if max(map(len, losses)) <= 12 else None}
    figure = framed(lines, 380, xaxis=xaxis, yaxis={"title": "Training loss"}, hovermode="closest", showlegend=True)
    caption = f"of client {recorded['client']} over the epochs, a line a round.{source}"
    return ReportFigure.of(f"ala-{recorded['client']}-{method}", "Loss while learning ALA's weights", caption, figure)


def _curves(
    runs: Sequence[RunSummary], kind: str, lines: Mapping[str, tuple[str, str]], measure: str, yaxis: Mapping[str, Any]
) -> go.Figure:
    """Draw the values of the recorder of this `kind` as curves of the `measure`; `lines` gives for each of its keys the ending of
    the method's name, and the dash."""
    traces: list[go.Scatter] = []
    for key, (ending, dash) in lines.items():
        series = []  # of every run, so that methods stay in their colours
        for run in runs:
            entry = next((entry for _, entry in of_kind([run], kind)), {})
            pairs = zip(entry.get("rounds", ()), entry.get(key, ()), strict=False)
            series.append(replace(run, records=[{"round": k, measure: value} for k, value in pairs], timings=[]))
        for trace in learning_curves(series, measure).data:
            if ending and trace.hoverinfo != "skip":
                trace.update(name=f"{trace.name}{ending}", line={"dash": dash}, mode="lines")
            traces.append(trace)
    return framed(traces, 380, xaxis={"title": "Round", "rangemode": "tozero"}, yaxis=yaxis, hovermode="closest")


def _objectives(runs: Sequence[RunSummary]) -> Iterator[ReportFigure]:
    if of_kind(runs, "objective"):
        caption = (
            "over the round's clients, weighted by samples: of the models received, before local training (dotted), and of the "
            f"models uploaded (solid).{_band(runs)}"
        )
        lines = {"before": (", before", "dot"), "after": (", after", "solid")}
        figure = _curves(runs, "objective", lines, "training_loss", {"title": "Training objective"})
        yield ReportFigure.of("objective", "Training objective", caption, figure)


def _similarity(runs: Sequence[RunSummary]) -> Iterator[ReportFigure]:
    if recorded := of_kind(runs, "similarity"):
        dotted = "; dotted, of the pool that the server keeps" if any("pool" in entry for _, entry in recorded) else ""
        caption = f"over all pairs of models that the clients uploaded in a round{dotted}.{_band(runs)}"
        lines = {"uploaded": ("", "solid"), "pool": (", pool", "dot")}
        yaxis = {"title": "Mean cosine similarity", "hoverformat": ".5~g"}
        figure = _curves(runs, "similarity", lines, "pool_cosine", yaxis)
        yield ReportFigure.of("similarity", "Mean cosine similarity", caption, figure)


def memorisation_figures(runs: Sequence[RunSummary]) -> Iterator[ReportFigure]:
    """Yield the figure of the right and the wrong labels that runs learned, where that was recorded."""
    if recorded := of_kind(runs, "memorisation"):
        wrong = max(entry["samples"][1] for _, entry in recorded)
        explained = (
            f"; solid, those with right labels; of the up to {wrong:,} with wrong ones, the share that is classified by the "
            "true label (dashed) and as given, that is, memorised (dotted)."
        )
        samples = (
            f"of the global model on training samples{explained if wrong else ', all of which have right labels.'}"
        )
        lines = {
            "right": (", right", "solid"),
            "corrected": (", wrong, true label", "dash"),
            "memorised": (", wrong, as given", "dot"),
        }
        yaxis = {"title": "Share of training samples", **SHARES}
        figure = _curves(runs, "memorisation", lines, "accuracy", yaxis)
        yield ReportFigure.of("memorisation", "Right and wrong labels", f"{samples}{_band(runs)}", figure)


def _local_models(chosen: Sequence[RunSummary], looks: Mapping[str, Style]) -> Iterator[ReportFigure]:
    """Yield the accuracy of all methods, then the loss, each on one scale."""
    recorded = of_kind(chosen, "aggregate")
    metric = chosen[0].metric if chosen else ACCURACY
    for measure in dict.fromkeys((metric.name, "loss")):
        lines = [line for _, entry in recorded for line in (*entry["models"][measure], entry["global"][measure])]
        values = [value for line in lines for value in line if value is not None]
        low, high = min(values, default=0.0), max(values, default=1.0)
        margin = 0.05 * ((high - low) or 1.0)
        for run, entry in recorded:
            name, count = run.algorithm, len(entry["slots"])
            models = f"the first {LOCAL_MODELS} of {count} models" if count > LOCAL_MODELS else "models"
            caption = (
                f"of the {models} that the clients of {name} upload (thin) and of the global model aggregated from them (thick). "
                f"Seed {run.seed}."
            )
            figure = _draw_local_models(name, entry, looks[name], measure, (low - margin, high + margin), metric)
            yield ReportFigure.of(f"local-{measure}-{name}", f"Local models: test {measure}", caption, figure)


def _landscapes(runs: Sequence[RunSummary], looks: Mapping[str, Style]) -> Iterator[ReportFigure]:
    """Yield a landscape for each method, all with the same contour lines, and the cross-sections through them."""
    comparable = _comparable_landscapes(runs)
    entries = {run.algorithm: entry for run, entry in comparable}
    for name, entry in entries.items():
        caption = f"around the final model of {name}, {_landscape_caption(comparable)}"
        yield ReportFigure.of(
            f"landscape-{name}", "Loss landscape", caption, landscapes({name: entry}, [*entries.values()])
        )
    if entries:
        caption = "in cross-section through the model, along the first direction (solid) and the second (dotted)."
        yield ReportFigure.of("landscape-cuts", "Loss landscape", caption, cross_sections(entries, looks))


def _comparable_landscapes(runs: Sequence[RunSummary]) -> list[Recorded]:
    """Return for each method the run whose landscape has the same points, data and directions as that of all runs' first."""
    recorded = of_kind(runs, "landscape")
    by_method: dict[str, Recorded] = {}
    for run, entry in recorded:
        if all(entry[key] == recorded[0][1][key] for key in ("x", "data", "directions")):
            by_method.setdefault(run.algorithm, (run, entry))
    return [*by_method.values()]


def _landscape_caption(comparable: Sequence[Recorded]) -> str:
    entry = comparable[0][1]
    samples = f"{entry['samples']:,} {'test' if entry['data'] == 'test' else 'training'} samples"
    alike = "" if len(comparable) < 2 else " Directions, axes and contour lines are the same for all methods."
    seeds = _seeds([run for run, _ in comparable])
    return f"on {samples}, in two random filter-normalised directions.{alike} {seeds}"


def _trajectory(method: str, entry: Entry, source: str) -> ReportFigure:
    low, high = entry["rounds"][0], entry["rounds"][-1]
    caption = f"span no plane; their training loss, rounds {low} to {high}.{source}"
    if "points" in entry:
        plane = "over its training loss in the plane of their two principal components"
        caption = f"{plane}, from round {low} (circle) to {high} (star).{source}"
    figure = trajectories(entry, {}, method) if "points" in entry else losses_by_round(method, entry)
    return ReportFigure.of(
        f"trajectory-{entry['client']}-{method}", f"Models of client {entry['client']}", caption, figure
    )


def _trajectories(entry: Entry, looks: Mapping[str, Style]) -> ReportFigure:
    caption = (
        f"with {', '.join(entry['methods'])} over its training loss in the plane of the two principal components of all, "
        f"each from its first recorded round (circle) to its last (star). Seed {entry['seed']}."
    )
    client, figure = entry["client"], trajectories(entry, looks)
    return ReportFigure.of(f"trajectories-{client}", f"Models of client {client}", caption, figure)


def _seeds(runs: Sequence[RunSummary]) -> str:
    return f"Seed {', '.join(map(str, sorted({run.seed for run in runs})))}."


def _band(runs: Sequence[RunSummary]) -> str:
    return " Mean over seeds, band ± one standard deviation." if len({run.seed for run in runs}) > 1 else ""
