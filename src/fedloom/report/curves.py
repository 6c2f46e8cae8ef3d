"""Learning curves: a measure over rounds, bytes or seconds as mean and standard deviation over
seeds, and their figure.
"""

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from fedloom.common.fields import require_one_of
from fedloom.objectives import ACCURACY, Metric
from fedloom.report.figures import Style, framed, number_format, of_method, pale, share_axis, styles
from fedloom.report.summary import RunSummary, by_algorithm, by_round, simulated_seconds
from fedloom.report.units import byte_unit

if TYPE_CHECKING:
    import pandas

AXES = {"round": "Round", "bytes": "Sent, down and up, {unit}", "seconds": "Seconds"}
"""Axes of a curve with their titles: the round, or the cost until its end. Seconds are those of the
simulated clock where there is one.
"""

MEASURES = {
    "accuracy": ("Test accuracy", "of the global model."),
    "personal_accuracy": ("Personal accuracy", "of each client's own model on its own test data."),
    "client_accuracy": ("Accuracy at the clients", "of the global model on the clients' own "
                                                   "test data."),
    "new_client_accuracy": (
        "Accuracy at new clients", "of models adapted to clients that never trained, on their "
                                   "own test data.",
    ),
    "loss": ("Test loss", "of the global model."),
    "training_loss": ("Training loss", "of the clients that took part, mean over their local "
                                       "steps."),
    "pool_cosine": ("Mean cosine similarity", "between the models of the pool."),
}  # fmt: skip
"""Title and caption of the figures that the records are known to have."""

POINTS = 400  # of a curve that are drawn: about the number that a screen can show
FEW = 8  # methods that share one hover box


def curve(
    runs: Sequence[RunSummary], measure: str = "accuracy", x: str = "round"
) -> "pandas.DataFrame | None":
    """Return the curve of one method over one of `AXES`.

    It has the rounds for which every run with the measure has a finite value, so a run that stopped
    early does not bend the mean.

    Args:
        runs: Runs of the method.
        measure: Figure of the records.
        x: The axis.

    Returns:
        A frame by round with the position `x`, the `mean` over runs and the sample standard
        deviation `std`, NaN for one run. None without such a round, or without times for `x`.
    """
    import pandas

    require_one_of("x", x, tuple(AXES))
    recorded = {k: series for k, run in enumerate(runs) if (series := by_round(run, measure))}
    values = pandas.DataFrame(recorded).sort_index()
    values = values[np.isfinite(values).all(axis=1)]
    positions = pandas.DataFrame({k: _positions(runs[k], x) for k in recorded})
    along = positions.reindex(values.index)
    if values.empty or along.isna().any(axis=None):
        return None
    std = values.std(axis=1)
    return pandas.DataFrame({"x": along.mean(axis=1), "mean": values.mean(axis=1), "std": std})


def thinned(line: "pandas.DataFrame", points: int) -> "pandas.DataFrame":
    """Return about `points` rows of a curve.

    These are both ends, and the lowest and the highest row of each of equal stretches.

    Args:
        line: A curve, with the column `mean`.
        points: Number of rows to draw; a shorter curve is returned unchanged.

    Returns:
        Rows of the curve in their order.
    """
    if len(line) <= points:
        return line
    drawn, means = {0, len(line) - 1}, line["mean"].to_numpy()
    for stretch in np.array_split(np.arange(len(line)), max(1, points // 2)):
        drawn |= {int(stretch[means[stretch].argmin()]), int(stretch[means[stretch].argmax()])}
    return line.iloc[sorted(drawn)]


def measures(metric: Metric) -> dict[str, tuple[str, str]]:
    """Return title and caption of the figures that records are known to have where runs are judged
    by this metric.
    """
    return {
        name.replace("accuracy", metric.name): (
            title.replace("accuracy", metric.noun).replace("Accuracy", metric.title),
            caption,
        )
        for name, (title, caption) in MEASURES.items()
    }


def title_of(measure: str, metric: Metric = ACCURACY) -> str:
    """Return the title of a measure's figure.

    Args:
        measure: Name of a figure in the records.
        metric: The metric of the task, which names its own measures.

    Returns:
        The title, or the name as words if the measure is not known.
    """
    entry = measures(metric).get(measure)
    return entry[0] if entry else measure.replace("_", " ").capitalize()


def is_share(measure: str, metric: Metric = ACCURACY) -> bool:
    """Return True if a measure is drawn in per cent.

    Args:
        measure: Name of a figure in the records.
        metric: The metric of the task.

    Returns:
        True for accuracies, and for measures of a metric in [0, 1].
    """
    return "accuracy" in measure or (metric.share and metric.name in measure)


def learning_curves(
    runs: Sequence[RunSummary], measure: str = "", x: str = "round", points: int = POINTS
) -> go.Figure:
    """Draw a measure of the records: mean over seeds, with a band of ± one standard deviation.

    Runs without the measure or the axis are left out.

    Args:
        runs: Runs of one task.
        measure: Name of a figure in the records; by default the metric.
        x: One of `AXES`: `round`, `bytes` down and up, or `seconds`.
        points: Points of a curve; a longer curve is thinned.

    Returns:
        The figure, with a curve for each method.
    """
    traces: list[go.Scatter] = []
    metric = runs[0].metric if runs else ACCURACY
    measure = measure or metric.name
    share = is_share(measure, metric)
    form = number_format(share)
    looks = styles(runs)
    curves = {name: curve(group, measure, x) for name, group in by_algorithm(runs).items()}
    drawn = {name: line for name, line in curves.items() if line is not None}
    size, unit = 1, ""
    if x == "bytes":
        size, unit = byte_unit(max((line["x"].iloc[-1] for line in drawn.values()), default=0.0))
    for name, line in drawn.items():
        points_drawn = thinned(line.assign(x=line["x"] / size), points)
        traces += [
            trace.update(of_method(name)) for trace in _traces(looks[name], points_drawn, form)
        ]
    simulated = x == "seconds" and simulated_seconds(runs[0]) is not None
    title = "Simulated seconds" if simulated else AXES[x].format(unit=unit)
    return framed(
        traces,
        380,
        xaxis={"title": title, "rangemode": "tozero", "hoverformat": ".4~g"},
        yaxis={
            "title": html.escape(title_of(measure, metric)),
            "hoverformat": form,
            **(share_axis(traces) if share else {}),
        },
        hovermode="x unified" if len(looks) <= FEW and x == "round" else "closest",
    )


def _positions(run: RunSummary, x: str) -> dict[int, float]:
    """Return the position of each round on the axis `x`: its number, or the cost until its end."""
    if x == "seconds" and simulated_seconds(run) is not None:
        return {int(line["round"]): float(line["simulated_seconds"]) for line in run.records}
    lines = run.timings if x == "seconds" else run.records
    numbers = [int(line["round"]) for line in lines]
    if x == "round":
        return dict(zip(numbers, map(float, numbers), strict=True))
    names = ("seconds",) if x == "seconds" else ("bytes_down", "bytes_up")
    spent = np.cumsum([sum(float(line.get(name, 0)) for name in names) for line in lines])
    return dict(zip(numbers, spent.tolist(), strict=True))


def _traces(style: Style, drawn: "pandas.DataFrame", form: str) -> Iterator[go.Scatter]:
    x, mean, std = (drawn[name].to_numpy() for name in ("x", "mean", "std"))
    several = not np.isnan(std).any()
    x = x.astype(np.float32)
    if several:
        yield go.Scatter(
            x=np.concatenate([x, x[::-1]]),
            y=np.concatenate([mean + std, (mean - std)[::-1]]).astype(np.float32),
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillcolor=pale(style.colour, 0.16),
            hoverinfo="skip",
            showlegend=False,
        )
    yield go.Scatter(
        x=x,
        y=mean.astype(np.float32),
        customdata=std.astype(np.float32) if several else None,
        mode="lines",
        line={"color": style.colour, "width": 2, "dash": style.dash},
        hovertemplate=f"%{{y:{form}}}" + (f" ± %{{customdata:{form}}}" if several else ""),
    )
