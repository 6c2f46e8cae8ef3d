"""Learning curves: a measure over rounds, bytes or seconds as mean and standard deviation over
seeds, and their figure.
"""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from fedloom.config.fields import require_one_of
from fedloom.objectives import ACCURACY, Metric
from fedloom.report.figures import SHARES, Style, framed, pale, styles
from fedloom.report.summary import RunSummary, by_algorithm, by_round, simulated_seconds
from fedloom.report.units import byte_unit

Floats = npt.NDArray[np.float64]

AXES = {"round": "Round", "bytes": "Sent, down and up, {unit}", "seconds": "Seconds"}
"""Axes of a curve with their titles: the round, or the cost until its end. Seconds are those of the
simulated clock where there is one.
"""

MEASURES = {
    "accuracy": ("Test accuracy", "of the global model."),
    "personal_accuracy": ("Personal accuracy", "of each client's own model on its own test data."),
    "client_accuracy": ("Accuracy at the clients", "of the global model on the clients' own test data."),
    "new_client_accuracy": (
        "Accuracy at new clients", "of models adapted to clients that never trained, on their own test data.",
    ),
    "loss": ("Test loss", "of the global model."),
    "training_loss": ("Training loss", "of the clients that took part, mean over their local steps."),
    "pool_cosine": ("Mean cosine similarity", "between the models of the pool."),
}  # fmt: skip
"""Title and caption of the figures that the records are known to have."""

POINTS = 400  # of a curve that are drawn: about as many as a screen can show
FEW = 8  # methods that share one hover box


@dataclass(frozen=True)
class Curve:
    """A method's curve; all arrays are `[points]`. `std` is the sample standard deviation over
    `seeds` runs, 0 for one run.
    """

    rounds: npt.NDArray[np.int64]
    x: Floats
    mean: Floats
    std: Floats
    seeds: int

    def thinned(self, points: int) -> "Curve":
        """Return about `points` of the measured points: both ends, and the lowest and the highest
        of each of equal stretches.
        """
        if len(self.x) <= points:
            return self
        drawn = {0, len(self.x) - 1}
        for stretch in np.array_split(np.arange(len(self.x)), max(1, points // 2)):
            drawn |= {
                int(stretch[self.mean[stretch].argmin()]),
                int(stretch[self.mean[stretch].argmax()]),
            }
        index = np.array(sorted(drawn))
        return Curve(
            self.rounds[index], self.x[index], self.mean[index], self.std[index], self.seeds
        )


def curve(runs: Sequence[RunSummary], measure: str = "accuracy", x: str = "round") -> Curve | None:
    """Return the curve of one method's `runs` over one of `AXES`, of the rounds for which every run
    with the measure has a finite value, so that a run that stopped early does not bend the mean;
    None without such a round, or without times for `x`.
    """
    require_one_of("x", x, tuple(AXES))
    recorded = {k: series for k, run in enumerate(runs) if (series := by_round(run, measure))}
    if not recorded:
        return None
    rounds = sorted(set.intersection(*(set(series) for series in recorded.values())))
    rounds = [
        number
        for number in rounds
        if all(np.isfinite(series[number]) for series in recorded.values())
    ]
    positions = [_positions(runs[k], x) for k in recorded]
    if not rounds or any(number not in position for position in positions for number in rounds):
        return None
    along = np.array(
        [[position[number] for number in rounds] for position in positions], dtype=np.float64
    )
    values = np.array([[series[number] for number in rounds] for series in recorded.values()])
    std = values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    return Curve(np.array(rounds, dtype=np.int64), along.mean(0), values.mean(0), std, len(values))


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
    """Return the title of a measure's figure."""
    entry = measures(metric).get(measure)
    return entry[0] if entry else measure.replace("_", " ").capitalize()


def is_share(measure: str, metric: Metric = ACCURACY) -> bool:
    """Return True if a measure is drawn in per cent."""
    return "accuracy" in measure or (metric.share and metric.name in measure)


def learning_curves(
    runs: Sequence[RunSummary], measure: str = "", x: str = "round", points: int = POINTS
) -> go.Figure:
    """Draw a measure of the records, by default the metric, over one of `AXES`: mean over seeds,
    with a band of ± one standard deviation. A curve of more than `points` is thinned; runs without
    the measure or the axis are left out.
    """
    traces: list[go.Scatter] = []
    metric = runs[0].metric if runs else ACCURACY
    measure = measure or metric.name
    share = is_share(measure, metric)
    form = ".1%" if share else ".4~g"
    looks = styles(runs)
    curves = {
        name: line
        for name, group in by_algorithm(runs).items()
        if (line := curve(group, measure, x))
    }
    size, unit = (
        byte_unit(max((line.x[-1] for line in curves.values()), default=0.0))
        if x == "bytes"
        else (1, "")
    )
    for name, line in curves.items():
        drawn = replace(line, x=line.x / size).thinned(points)
        traces += [
            trace.update(name=html.escape(name), legendgroup=name)
            for trace in _traces(looks[name], drawn, form)
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
            **(SHARES if share else {}),
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


def _traces(style: Style, drawn: Curve, form: str) -> Iterator[go.Scatter]:
    x, several = drawn.x.astype(np.float32), drawn.seeds > 1
    if several:
        low, high = drawn.mean - drawn.std, drawn.mean + drawn.std
        yield go.Scatter(
            x=np.concatenate([x, x[::-1]]),
            y=np.concatenate([high, low[::-1]]).astype(np.float32),
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillcolor=pale(style.colour, 0.16),
            hoverinfo="skip",
            showlegend=False,
        )
    yield go.Scatter(
        x=x,
        y=drawn.mean.astype(np.float32),
        customdata=drawn.std.astype(np.float32) if several else None,
        mode="lines+markers" if len(x) <= 2 else "lines",
        line={"color": style.colour, "width": 2, "dash": style.dash},
        hovertemplate=f"%{{y:{form}}}" + (f" ± %{{customdata:{form}}}" if several else ""),
    )
