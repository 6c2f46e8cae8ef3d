"""A cell's value from the runs that fill it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fedloom.config.expression import parse
from fedloom.data.dataset import DataSpec
from fedloom.flat.layout import Layout
from fedloom.models.build import build_model
from fedloom.models.structure import block_parameters
from fedloom.papers.paper_data import facts
from fedloom.papers.protocols import PaperCell, Printed
from fedloom.report import summary as figures
from fedloom.report.sheet import Criterion, criterion
from fedloom.report.summary import RunSummary, Spread
from fedloom.task import make_dataset

LAST = 10
"""Evaluations at the end of a run; their spread is what the FedMR papers' standard deviation is taken for."""

Runs = Sequence[RunSummary]


@dataclass(frozen=True)
class Measured:
    """A value over the runs of a cell: `mean` is None where a target was not reached by every run (`reached` of `runs` did);
    `std` is None with one value; `rounds` is the length of the runs. `best` is, beside a target, the best accuracy of any
    run, %."""

    mean: float | None
    std: float | None
    runs: int
    reached: int
    rounds: int
    best: float | None = None


def measured(cell: PaperCell, runs: Runs, base: Runs = ()) -> Measured | None:
    """Return the cell's value over its `runs`, a seed each; `base` are those of its baseline, where it has one.

    None when there is no run, or no figure of the kind in them.
    """
    kind, target = cell.measure.kind, (cell.measure.target or 0.0) / 100
    if kind == "weights":
        return Measured(float(_weights(cell)), None, 1, 1, 0)
    if not runs:
        return None
    if kind == "end":
        return _end(runs)
    if kind == "rounds":
        best = max((share for run in runs if (share := figures.best(run)) is not None), default=None)
        reach = crossing if cell.measure.interpolated else figures.rounds_to
        return _reached([reach(run, target) for run in runs], runs, _percent(best))
    if kind == "speedup":
        return _speedup(runs, base, target)
    values: dict[str, Callable[[RunSummary], float | None]] = {
        "improvement": lambda run: _improvement(run, base),
        "minutes": _minutes,
        "total": _total,
        "slower": lambda run: _slower(run, base),
        "models": lambda run: _models(run, cell),
        "classes": _classes,
        **{name: lambda run: _percent(CRITERIA[kind].of(run)) for name in CRITERIA},
    }
    spread = Spread.of([value for run in runs if (value := values[kind](run)) is not None])
    if spread is None:
        return None
    return Measured(spread.mean, spread.std if spread.count > 1 else None, len(runs), spread.count, _length(runs))


def judged(cells: Sequence[PaperCell]) -> Criterion | None:
    """Return the criterion of the first of the cells whose measure is an accuracy; None without such a cell."""
    return next((CRITERIA[cell.measure.kind] for cell in cells if cell.measure.kind in CRITERIA), None)


def difference(result: Measured | None, printed: Printed | None) -> float | None:
    """Return the measured minus the printed figure."""
    if result is None or printed is None or result.mean is None or printed.mean is None:
        return None
    return result.mean - printed.mean


def deviations(result: Measured | None, printed: Printed | None) -> float | None:
    """Return the difference in standard deviations, d / sqrt(s_printed^2 + s_measured^2); None where there is neither of them."""
    by = difference(result, printed)
    if by is None or result is None or printed is None:
        return None
    std = math.hypot(printed.std or 0.0, result.std or 0.0)
    return by / std if std > 0 else None


def _length(runs: Runs) -> int:
    return max(len(run.records) for run in runs)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _end(runs: Runs) -> Measured | None:
    """Return the mean over runs of the mean of the last evaluations, with the deviation within a run: sqrt(mean_r s_r^2)."""
    ends = [[100 * value for value in figures.accuracies(run)[-LAST:]] for run in runs]
    if not all(ends):
        return None
    mean = statistics.fmean(statistics.fmean(values) for values in ends)
    within = [statistics.variance(values) for values in ends if len(values) > 1]
    std = math.sqrt(statistics.fmean(within)) if within else None
    return Measured(mean, std, len(runs), len(runs), _length(runs))


def _reached(values: Sequence[float | None], runs: Runs, best: float | None = None) -> Measured:
    """Summarise a value that runs have only where they reached a target: no mean unless all did."""
    reached = [value for value in values if value is not None]
    complete = len(reached) == len(values)
    std = statistics.stdev(reached) if complete and len(reached) > 1 else None
    return Measured(
        statistics.fmean(reached) if complete else None, std, len(values), len(reached), _length(runs), best
    )


def crossing(run: RunSummary, target: float) -> float | None:
    """Return the round at which the best accuracy so far, drawn with straight lines between evaluations, crosses `target`; None
    if it never does. The line to the first evaluation begins at round 0 and accuracy 0."""
    highest, last_round = 0.0, 0
    for number, accuracy in figures.by_round(run, run.metric.name).items():
        if accuracy >= target:
            return last_round + (number - last_round) * (target - highest) / (accuracy - highest)
        highest, last_round = max(highest, accuracy), number
    return None


def _speedup(runs: Runs, base: Runs, target: float) -> Measured | None:
    """Divide rounds of the baseline's run with the same seed by a run's rounds."""
    theirs = {run.seed: figures.rounds_to(run, target) for run in base}
    pairs = [(theirs[run.seed], figures.rounds_to(run, target)) for run in runs if run.seed in theirs]
    return _reached([a / b if a is not None and b is not None else None for a, b in pairs], runs) if pairs else None


def _best_personal(run: RunSummary) -> float | None:
    return max(figures.by_round(run, "personal_accuracy").values(), default=None)


def _improvement(run: RunSummary, base: Runs) -> float | None:
    """Return the points above the baseline's run with the same seed."""
    best = _best_personal(run)
    baseline = next((_best_personal(match) for match in base if match.seed == run.seed), None)
    return None if best is None or baseline is None else 100 * best - 100 * baseline


def _best_joining(run: RunSummary) -> float | None:
    """Return the best accuracy of any round over the clients that train in the round which the evaluated models begin."""
    joining = {int(record["round"]): set(record["clients"]) for record in run.records}
    means = []
    for line in run.clients:
        table, clients = line.get("personal"), joining.get(int(line["round"]) + 1, set())
        lines = [] if table is None else zip(table["clients"], table["samples"], table["accuracy"], strict=True)
        if counted := [(samples, accuracy) for client, samples, accuracy in lines if client in clients]:
            means.append(sum(s * a for s, a in counted) / sum(s for s, _ in counted))
    return max(means, default=None)


def _seconds(line: Mapping[str, float]) -> float:
    """Return the seconds of training and server work in a round."""
    return float(line["train_seconds"] + line["server_seconds"])


def _minutes(run: RunSummary) -> float | None:
    """Return the median minutes of a round."""
    return statistics.median(map(_seconds, run.timings)) / 60 if run.timings else None


def _total(run: RunSummary) -> float | None:
    """Return the minutes until the round with the best personal accuracy is over."""
    scores = figures.by_round(run, "personal_accuracy")
    if not scores or not run.timings:
        return None
    best = max(scores, key=lambda number: scores[number])
    return sum(_seconds(line) for line in run.timings if line["round"] <= best) / 60


def _slower(run: RunSummary, base: Runs) -> float | None:
    baselines = [minutes for baseline in base if (minutes := _minutes(baseline))]
    minutes = _minutes(run)
    return minutes / statistics.fmean(baselines) if minutes and baselines else None


def _models(run: RunSummary, cell: PaperCell) -> float:
    """Return bytes of the run's final round in models; by one client or by all of the round."""
    record, name = run.records[-1], str(run.configuration["data"]["name"])
    data = parse(cell.setting.data).name
    spec = facts()[data].spec if name.startswith(("part", data)) else make_dataset(name).spec  # a stand-in may differ
    sent = (record["bytes_down"] + record["bytes_up"]) / (4 * _sizes(str(run.configuration["model"]), spec)[0])
    return float(sent / len(record["clients"]) if cell.measure.a_client else sent)


@cache
def _sizes(model: str, spec: DataSpec) -> tuple[int, tuple[int, ...]]:
    """Return the size of a model, buffers included, and of the trainable part of each of its blocks, from bottom to top."""
    module = build_model(model, spec, 0)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    blocks = tuple(sum(sizes[name] for name in names) for names in block_parameters(module))
    return Layout(module).size, blocks


def _weights(cell: PaperCell) -> int:
    """Return the number of ALA's weights, one for each parameter of the p highest blocks."""
    ranges = int(parse(cell.algorithm).named["p"])
    return sum(_sizes(cell.setting.model, facts()[parse(cell.setting.data).name].spec)[1][-ranges:])


def _classes(run: RunSummary) -> float | None:
    classes = [sum(count > 0 for count in counts) for counts in run.label_counts]
    return statistics.fmean(classes) if classes else None


CRITERIA = {
    "best": criterion("best"),
    "end": criterion("last", LAST),
    "personal": Criterion("best accuracy of the clients' own models", _best_personal),
    "joining": Criterion("best accuracy of the joining clients' own models", _best_joining),
}
"""Criteria of the runs of a cell whose measure is an accuracy."""
