"""Figures of recorders' results (`fedloom.recording`)."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from fedloom.report.curves import is_share, learning_curves, title_of
from fedloom.report.figures import (
    BAND,
    ROUNDS,
    SEQUENCE,
    ReportFigure,
    Style,
    align,
    evenly_spaced,
    framed,
    number_format,
    pale,
    share_axis,
    styles,
)
from fedloom.report.landscapes import Entry, cross_sections, landscape, trajectories
from fedloom.report.summary import RunSummary, by_algorithm

LOCAL_MODELS = 10  # of a method, each drawn as a line
DRAWN_ROUNDS = (
    12  # of ALA's learning that are drawn, evenly spaced, the first and the last among them
)
LIMIT = 24  # figures of recorded values on one page
# the part of the colour scale that is visible on white and on near black alike
EARLY, LATE = 0.35, 0.88

Recorded = tuple[RunSummary, Entry]
"""A run with the result of one of its recorders."""


def recorded_figures(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """Return the figures of all recorders, for each method of the first seed that recorded
    anything, up to `LIMIT` figures; objectives, similarity and memorisation are over all seeds.
    """
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
    joint = of_kind(runs, "trajectories")
    figures += [_trajectories(entry, entry["methods"], run, looks) for run, entry in joint]
    shown = {(method, entry["client"]) for _, entry in joint for method in entry["methods"]}
    figures += [_ala_losses(run, entry) for run, entry in of_kind(chosen, "ala")]
    for run, entry in of_kind(chosen, "trajectory"):
        if "points" in entry and (run.algorithm, entry["client"]) not in shown:
            figures.append(_trajectories(entry, {run.algorithm: entry}, run, looks))
    return [figure for figure in figures if figure.variants[""].data][:LIMIT]


def of_kind(runs: Sequence[RunSummary], kind: str) -> list[Recorded]:
    """Return all records of this kind, each with its run.

    Args:
        runs: The runs.
        kind: Name of a recorder, such as `landscape`.

    Returns:
        Pairs of run and record, in the order of the runs.
    """
    return [(run, entry) for run in runs for entry in run.recorded if entry["kind"] == kind]


def _ala_losses(run: RunSummary, recorded: Entry) -> ReportFigure:
    """Draw the loss of each epoch of ALA's learning, a line a round from early to late; up to
    `DRAWN_ROUNDS` rounds.
    """
    rounds, losses = recorded["rounds"], recorded["losses"]
    shown = evenly_spaced(len(rounds), DRAWN_ROUNDS)
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
            legendgroup=run.algorithm,
        )
        for k, colour in zip(shown, sample_colorscale(SEQUENCE, shares), strict=True)
    ]
    xaxis = {
        "title": "Epoch of learning the weights",
        "dtick": 1 if max(map(len, losses)) <= 12 else None,
    }
    figure = framed(
        lines,
        380,
        xaxis=xaxis,
        yaxis={"title": "Training loss"},
        hovermode="closest",
        showlegend=True,
    )
    client, source = recorded["client"], f"{run.algorithm}, seed {run.seed}"
    caption = f"of client {client} over the epochs, a line a round. {source}."
    return ReportFigure.of(
        f"ala-{client}-{run.algorithm}", "Loss while learning ALA's weights", caption, figure
    )


def _curves(
    runs: Sequence[RunSummary],
    kind: str,
    lines: Mapping[str, tuple[str, str]],
    measure: str,
    title: str,
    form: str = "",
) -> go.Figure:
    """Draw the values of the recorder of this `kind` as curves of the `measure`; `lines` gives for
    each of its keys the ending of the method's name, and the dash.
    """
    traces: list[go.Scatter] = []
    for key, (ending, dash) in lines.items():
        series = []  # of every run, so that methods stay in their colours
        for run in runs:
            entry = next((entry for _, entry in of_kind([run], kind)), {})
            pairs = zip(entry.get("rounds", ()), entry.get(key, ()), strict=False)
            series.append(
                replace(
                    run, records=[{"round": k, measure: value} for k, value in pairs], timings=[]
                )
            )
        for trace in learning_curves(series, measure).data:
            if ending and trace.hoverinfo != "skip":
                trace.update(name=f"{trace.name}{ending}", line={"dash": dash}, mode="lines")
            traces.append(trace)
    shares = share_axis(traces) if is_share(measure) else {}
    yaxis = {"title": title, "hoverformat": form or None, **shares}
    return framed(traces, 380, xaxis=ROUNDS, yaxis=yaxis, hovermode="closest")


def _objectives(runs: Sequence[RunSummary]) -> Iterator[ReportFigure]:
    if of_kind(runs, "objective"):
        caption = (
            "over the round's clients, weighted by samples: of the models received, before "
            "local training (dotted), and of the "
            f"models uploaded (solid).{_band(runs)}"
        )
        lines = {"before": (", before", "dot"), "after": (", after", "solid")}
        figure = _curves(runs, "objective", lines, "training_loss", "Training objective")
        yield ReportFigure.of("objective", "Training objective", caption, figure)


def _similarity(runs: Sequence[RunSummary]) -> Iterator[ReportFigure]:
    if recorded := of_kind(runs, "similarity"):
        pool = any("pool" in entry for _, entry in recorded)
        dotted = "; dotted, of the pool that the server keeps" if pool else ""
        uploaded = f"over all pairs of models that the clients uploaded in a round{dotted}."
        caption = f"{uploaded}{_band(runs)}"
        lines = {"uploaded": ("", "solid"), "pool": (", pool", "dot")}
        figure = _curves(runs, "similarity", lines, "pool_cosine", "Mean cosine similarity", ".5~g")
        yield ReportFigure.of("similarity", "Mean cosine similarity", caption, figure)


def memorisation_figures(runs: Sequence[RunSummary]) -> Iterator[ReportFigure]:
    """Yield the figure of the right and the wrong labels that runs learned, where that was
    recorded.
    """
    if recorded := of_kind(runs, "memorisation"):
        wrong = max(int(np.reshape(entry["samples"], (-1, 2))[0, 1]) for _, entry in recorded)
        samples = "predicted by the global model. Training samples with right labels: solid."
        if wrong:
            samples += " Mislabelled samples: dashed = true label predicted, dotted = wrong label."
        lines = {
            "right": (", right", "solid"),
            "corrected": (", wrong, true label", "dash"),
            "memorised": (", wrong, as given", "dot"),
        }
        figure = _curves(runs, "memorisation", lines, "accuracy", "Share of training samples")
        yield ReportFigure.of(
            "memorisation", "Right and wrong labels", f"{samples}{_band(runs)}", figure
        )


def _local_models(
    chosen: Sequence[RunSummary], looks: Mapping[str, Style]
) -> Iterator[ReportFigure]:
    recorded = of_kind(chosen, "aggregate")
    for measure in dict.fromkeys(name for run, _ in recorded for name in (run.metric.name, "loss")):
        drawn: list[ReportFigure] = []
        for run, entry in recorded:
            name, share = run.algorithm, is_share(measure, run.metric)
            number = f"%{{y:{number_format(share)}}}"
            common: dict[str, Any] = {
                "mode": "lines+markers",
                "connectgaps": True,
                "legendgroup": name,
            }
            traces = [
                go.Scatter(
                    x=entry["rounds"],
                    y=values,
                    line={"color": pale(looks[name].colour, 0.35), "width": 1},
                    marker={"size": 4},
                    hovertemplate=f"model {slot + 1}, round %{{x}}: {number}<extra></extra>",
                    name=f"model {slot + 1}",
                    showlegend=False,
                    **common,
                )
                for slot, values in zip(
                    entry["slots"][:LOCAL_MODELS], entry["models"][measure], strict=False
                )
            ]
            thick = go.Scatter(
                x=entry["rounds"],
                y=entry["global"][measure],
                line={"color": looks[name].colour, "width": 3.5},
                marker={"size": 7},
                hovertemplate=f"global model, round %{{x}}: {number}<extra></extra>",
                name=f"global model of {html.escape(name)}",
                **common,
            )
            yaxis = {
                "title": title_of(measure, run.metric),
                "tickformat": ".2~%" if share else None,
            }
            figure = framed([*traces, thick], 340, xaxis=ROUNDS, yaxis=yaxis, hovermode="closest")
            count = len(entry["slots"])
            models = (
                f"the first {LOCAL_MODELS} of {count} models" if count > LOCAL_MODELS else "models"
            )
            caption = (
                f"of the {models} that the clients of {name} upload (thin) and of the global "
                "model aggregated from them (thick). "
                f"Seed {run.seed}."
            )
            title = f"Local models: test {measure}"
            drawn.append(ReportFigure.of(f"local-{measure}-{name}", title, caption, figure))
        align([figure.variants[""] for figure in drawn])
        yield from drawn


def _landscapes(runs: Sequence[RunSummary], looks: Mapping[str, Style]) -> Iterator[ReportFigure]:
    """Draw each method's landscape, but for those of other points, data or directions than the
    first, and cross-sections.
    """
    recorded = of_kind(runs, "landscape")
    by_method: dict[str, Recorded] = {}
    for run, entry in recorded:
        if all(entry[key] == recorded[0][1][key] for key in ("x", "data", "directions")):
            by_method.setdefault(run.algorithm, (run, entry))
    entries = {name: entry for name, (_, entry) in by_method.items()}
    alike = (
        " Directions, axes and contour lines are the same for all methods."
        if len(entries) > 1
        else ""
    )
    for name, (run, entry) in by_method.items():
        samples = (
            f"{entry['samples']:,} {'test' if entry['data'] == 'test' else 'training'} samples"
        )
        caption = (
            f"around the final model of {name}, on {samples}, in two random filter-normalised "
            f"directions.{alike} "
            f"Seed {run.seed}."
        )
        figure = landscape(name, entry, [*entries.values()])
        yield ReportFigure.of(f"landscape-{name}", "Loss landscape", caption, figure)
    if entries:
        caption = (
            "in cross-section through the model, along the first direction (solid) and "
            "the second (dotted)."
        )
        yield ReportFigure.of(
            "landscape-cuts", "Loss landscape", caption, cross_sections(entries, looks)
        )


def _trajectories(
    entry: Entry, paths: Mapping[str, Entry], run: RunSummary, looks: Mapping[str, Style]
) -> ReportFigure:
    client, figure = entry["client"], trajectories(entry, paths, looks)
    caption = (
        f"with {', '.join(paths)} over its training loss in the plane of the two principal "
        "components of all, each from its "
        f"first recorded round (circle) to its last (star). Seed {run.seed}."
    )
    name = (
        f"trajectories-{client}"
        if entry["kind"] == "trajectories"
        else f"trajectory-{client}-{run.algorithm}"
    )
    return ReportFigure.of(name, f"Models of client {client}", caption, figure)


def _band(runs: Sequence[RunSummary]) -> str:
    return BAND if len({run.seed for run in runs}) > 1 else ""
