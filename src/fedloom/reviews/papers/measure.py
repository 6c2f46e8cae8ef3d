"""A cell's value from the runs that fill it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fedloom.common.expression import parse
from fedloom.data.dataset import DataSpec, make_dataset
from fedloom.models.build import build_model
from fedloom.models.structure import block_parameters
from fedloom.report import summary as figures
from fedloom.report.sheet import Criterion, criterion
from fedloom.report.summary import RunSummary
from fedloom.reviews.papers.paper_data import FACTS
from fedloom.reviews.papers.protocols import PaperCell, Printed

LAST = 10
"""Evaluations at the end of a run. The standard deviation of the FedMR papers is taken as their
spread.
"""

Runs = Sequence[RunSummary]


@dataclass(frozen=True)
class Measured:
    """A value over the runs of a cell: `mean` is None where a target was not reached by every run
    (`reached` of `runs` did); `std` is None with one value; `rounds` is the length of the runs.
    `best` is, beside a target, the best accuracy of any run, %.
    """

    mean: float | None = None
    std: float | None = None
    runs: int = 1
    reached: int = 1
    rounds: int = 0
    best: float | None = None


def measured(cell: PaperCell, runs: Runs, base: Runs = ()) -> Measured | None:
    """Return the cell's value over its runs.

    Args:
        cell: The cell, with its kind of figure.
        runs: Runs of the cell, one for each seed.
        base: Runs of its baseline; by default none.

    Returns:
        Mean and deviation over the seeds, in the units of the cell. None without a run, or without
        a figure of the kind.
    """
    kind = cell.measure.kind
    by_seed = {run.seed: run for run in base}
    if kind == "weights":
        return Measured(float(_weights(cell)))
    if kind == "speedup":
        runs = [run for run in runs if run.seed in by_seed]
    if not runs:
        return None
    rounds = max(len(run.records) for run in runs)
    if kind == "end":
        return _end(runs, rounds)
    reached = [value for run in runs if (value := _value(cell, run, by_seed)) is not None]
    if not reached and cell.measure.target is None:
        return None
    shares = [
        share for run in runs if kind == "rounds" and (share := figures.best(run)) is not None
    ]
    counts = (len(runs), len(reached), rounds, 100 * max(shares) if shares else None)
    if cell.measure.target is not None and len(reached) < len(runs):
        return Measured(None, None, *counts)
    return Measured(
        statistics.fmean(reached), statistics.stdev(reached) if reached[1:] else None, *counts
    )


def _value(cell: PaperCell, run: RunSummary, base: Mapping[int, RunSummary]) -> float | None:
    """Return the value of one run; None where it has none, or has not reached its target."""
    kind = cell.measure.kind
    target = (cell.measure.target or 0.0) / 100
    baseline = base.get(run.seed)
    match kind:
        case "rounds":
            return (
                crossing(run, target)
                if cell.measure.interpolated
                else figures.rounds_to(run, target)
            )
        case "speedup":
            theirs, ours = (
                figures.rounds_to(summary, target) if summary else None
                for summary in (baseline, run)
            )
            return theirs / ours if theirs and ours else None
        case "improvement":
            reference, best = (
                _best_personal(summary) if summary else None for summary in (baseline, run)
            )
            return None if best is None or reference is None else 100 * best - 100 * reference
        case "minutes":
            return _minutes(run)
        case "slower":
            minutes = _minutes(run)
            baselines = list(filter(None, map(_minutes, base.values())))
            return minutes / statistics.fmean(baselines) if minutes and baselines else None
        case "total":
            return _total(run)
        case "models":
            return _models(run, cell)
        case "classes":
            classes = [sum(count > 0 for count in counts) for counts in run.label_counts]
            return statistics.fmean(classes) if classes else None
    share = CRITERIA[kind].of(run)
    return None if share is None else 100 * share


def judged(cells: Sequence[PaperCell]) -> Criterion | None:
    """Return the criterion of the first cell that is measured by an accuracy; None without such a
    cell.
    """
    return next(
        (CRITERIA[cell.measure.kind] for cell in cells if cell.measure.kind in CRITERIA), None
    )


def difference(result: Measured | None, printed: Printed | None) -> float | None:
    """Return the measured minus the printed figure.

    Args:
        result: The measurement; None if nothing was measured.
        printed: The figure of the paper; None if it prints none.

    Returns:
        The difference in the units of the cell, or None.
    """
    ours, theirs = (figure.mean if figure else None for figure in (result, printed))
    return None if ours is None or theirs is None else ours - theirs


def deviations(result: Measured | None, printed: Printed | None) -> float | None:
    """Return the difference in standard deviations, d / sqrt(s_printed^2 + s_measured^2).

    Args:
        result: As in `difference`.
        printed: As in `difference`.

    Returns:
        None without a difference or a deviation.
    """
    by = difference(result, printed)
    if by is None or result is None or printed is None:
        return None
    std = math.hypot(printed.std or 0.0, result.std or 0.0)
    return by / std if std > 0 else None


def _end(runs: Runs, rounds: int) -> Measured | None:
    """Return the mean over runs of the mean of the last evaluations, with the deviation within a
    run: sqrt(mean_r s_r^2).
    """
    ends = [[100 * value for value in figures.accuracies(run)[-LAST:]] for run in runs]
    if not all(ends):
        return None
    within = [statistics.variance(values) for values in ends if len(values) > 1]
    std = math.sqrt(statistics.fmean(within)) if within else None
    return Measured(
        statistics.fmean(map(statistics.fmean, ends)), std, len(runs), len(runs), rounds
    )


def crossing(run: RunSummary, target: float) -> float | None:
    """Return the round at which the best accuracy so far crosses `target`.

    The accuracy is drawn with straight lines between evaluations. The line to the first evaluation
    begins at round 0 and accuracy 0.

    Args:
        run: The run.
        target: The accuracy, a share in [0, 1].

    Returns:
        The round, with fractions; None if the curve never crosses the target.
    """
    highest = 0.0
    last_round = 0
    for number, accuracy in figures.by_round(run, run.metric.name).items():
        if accuracy >= target:
            return last_round + (number - last_round) * (target - highest) / (accuracy - highest)
        highest = max(highest, accuracy)
        last_round = number
    return None


def _best_personal(run: RunSummary) -> float | None:
    return max(figures.by_round(run, "personal_accuracy").values(), default=None)


def _best_joining(run: RunSummary) -> float | None:
    """Return the best accuracy of any round over the clients that train in the round which the
    evaluated models begin.
    """
    joining = {int(record["round"]): set(record["clients"]) for record in run.records}
    means = []
    for line in run.clients:
        table = line.get("personal")
        clients = joining.get(int(line["round"]) + 1, set())
        lines = (
            []
            if table is None
            else zip(table["clients"], table["samples"], table["accuracy"], strict=True)
        )
        if counted := [
            (samples, accuracy) for client, samples, accuracy in lines if client in clients
        ]:
            means.append(sum(s * a for s, a in counted) / sum(s for s, _ in counted))
    return max(means, default=None)


def _seconds(line: Mapping[str, float]) -> float:
    return float(line["train_seconds"] + line["server_seconds"])


def _minutes(run: RunSummary) -> float | None:
    return statistics.median(map(_seconds, run.timings)) / 60 if run.timings else None


def _total(run: RunSummary) -> float | None:
    scores = figures.by_round(run, "personal_accuracy")
    if not scores or not run.timings:
        return None
    best = max(scores, key=lambda number: scores[number])
    return sum(_seconds(line) for line in run.timings if line["round"] <= best) / 60


def _models(run: RunSummary, cell: PaperCell) -> float:
    record = run.records[-1]
    name = str(run.configuration["data"]["name"])
    data = parse(cell.setting.data).name
    # a stand-in may differ
    spec = FACTS[data].spec if name.startswith(("part", data)) else make_dataset(name).spec
    sent = (record["bytes_down"] + record["bytes_up"]) / (
        4 * _sizes(str(run.configuration["model"]), spec)[0]
    )
    return float(sent / len(record["clients"]) if cell.measure.a_client else sent)


@cache
def _sizes(model: str, spec: DataSpec) -> tuple[int, tuple[int, ...]]:
    """Return the size of a model, buffers included, and of the trainable part of each of its
    blocks, from bottom to top.
    """
    module = build_model(model, spec, 0)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    blocks = tuple(sum(sizes[name] for name in names) for names in block_parameters(module))
    floats = (tensor for tensor in module.state_dict().values() if tensor.is_floating_point())
    return sum(tensor.numel() for tensor in floats), blocks


def _weights(cell: PaperCell) -> int:
    ranges = int(parse(cell.algorithm).named["p"])  # the highest blocks
    return sum(_sizes(cell.setting.model, FACTS[parse(cell.setting.data).name].spec)[1][-ranges:])


CRITERIA = {
    "best": criterion("best"),
    "end": criterion("last", LAST),
    "personal": Criterion("best accuracy of the clients' own models", _best_personal),
    "joining": Criterion("best accuracy of the joining clients' own models", _best_joining),
}
"""Criteria of runs for the measures that are accuracies."""
