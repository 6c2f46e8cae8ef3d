"""A cell's value out of the runs that fill it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from fedloom.config.expression import parse
from fedloom.data.dataset import DataSpec
from fedloom.flat.layout import Layout
from fedloom.models.build import build_model
from fedloom.models.structure import block_parameters
from fedloom.papers.needs import FACTS
from fedloom.papers.protocols import Cell, Printed
from fedloom.report import summary as figures
from fedloom.report.sheet import Criterion, criterion
from fedloom.report.summary import RunSummary, Spread
from fedloom.task import make_dataset

LAST = 10
"""Evaluations at the end of a run whose spread the FedMR papers' standard deviation is read as."""


@dataclass(frozen=True)
class Found:
    """What was measured: `mean` is None where a target was not reached by every run (`reached` of `runs` did); `std` is None
    where there is nothing to take it over; `rounds` is the length of the runs. `best` is, beside a target, the best accuracy
    of any run, %."""

    mean: float | None
    std: float | None
    runs: int
    reached: int
    rounds: int
    best: float | None = None


def found(cell: Cell, runs: Sequence[RunSummary], base: Sequence[RunSummary] = ()) -> Found | None:
    """The cell's value over its `runs`, a seed each; `base` are those of the run beside it, where there is one.

    None when there is no run, or no figure of the kind in them.
    """
    kind = cell.measure.kind
    if kind == "weights":
        return Found(float(_weights(cell)), None, 1, 1, 0)
    if not runs:
        return None
    if kind == "end":
        return _end(runs)
    if kind == "rounds":
        return _rounds(runs, (cell.measure.target or 0.0) / 100)
    if kind == "speedup":
        return _speedup(runs, base, (cell.measure.target or 0.0) / 100)
    if kind in SCORES:
        return _spread(runs, [_percent(SCORES[kind].of(run)) for run in runs])
    measures: dict[str, Callable[[RunSummary], float | None]] = {
        "improvement": lambda run: _improvement(run, base),
        "minutes": lambda run: _minutes(run),
        "total": _total,
        "slower": lambda run: _over(run, base),
        "models": lambda run: _models(run, cell),
        "classes": _classes,
    }
    return _spread(runs, [measures[kind](run) for run in runs])


def difference(here: Found | None, paper: Printed | None) -> float | None:
    """What was measured less what is printed."""
    if here is None or paper is None or here.mean is None or paper.mean is None:
        return None
    return here.mean - paper.mean


def deviations(here: Found | None, paper: Printed | None) -> float | None:
    """The difference in standard deviations, d / sqrt(s_paper^2 + s_here^2), of those that are known; None where none is."""
    by = difference(here, paper)
    if by is None or here is None or paper is None:
        return None
    together = math.hypot(paper.std or 0.0, here.std or 0.0)
    return by / together if together > 0 else None


def _spread(runs: Sequence[RunSummary], values: Sequence[float | None]) -> Found | None:
    known = [value for value in values if value is not None]
    spread = Spread.of(known)
    if spread is None:
        return None
    std = spread.std if spread.count > 1 else None
    return Found(spread.mean, std, len(runs), len(known), _length(runs))


def _length(runs: Sequence[RunSummary]) -> int:
    return max(len(run.records) for run in runs)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _end(runs: Sequence[RunSummary]) -> Found | None:
    """Mean over runs of the mean of the last evaluations, with the deviation within a run: sqrt(mean_r s_r^2)."""
    ends = [[100 * value for value in figures.accuracies(run)[-LAST:]] for run in runs]
    if not all(ends):
        return None
    mean = statistics.fmean(statistics.fmean(values) for values in ends)
    within = [statistics.variance(values) for values in ends if len(values) > 1]
    std = math.sqrt(statistics.fmean(within)) if within else None
    return Found(mean, std, len(runs), len(runs), _length(runs))


def _rounds(runs: Sequence[RunSummary], target: float) -> Found:
    reached = [float(number) for run in runs if (number := figures.rounds_to(run, target)) is not None]
    whole = len(reached) == len(runs)
    std = statistics.stdev(reached) if whole and len(reached) > 1 else None
    mean = statistics.fmean(reached) if whole else None
    best = max((share for run in runs if (share := figures.best(run)) is not None), default=None)
    return Found(mean, std, len(runs), len(reached), _length(runs), _percent(best))


def _speedup(runs: Sequence[RunSummary], base: Sequence[RunSummary], target: float) -> Found | None:
    """Rounds of the run with the same seed beside it over a run's own; no mean unless every one of both reached the target."""
    beside = {run.seed: figures.rounds_to(run, target) for run in base}
    pairs = [(beside[run.seed], figures.rounds_to(run, target)) for run in runs if run.seed in beside]
    if not pairs:
        return None
    ratios = [theirs / own for theirs, own in pairs if theirs is not None and own is not None]
    whole = len(ratios) == len(pairs)
    std = statistics.stdev(ratios) if whole and len(ratios) > 1 else None
    return Found(statistics.fmean(ratios) if whole else None, std, len(pairs), len(ratios), _length(runs))


def _best_personal(run: RunSummary) -> float | None:
    return max(_personal(run).values(), default=None)


def _improvement(run: RunSummary, base: Sequence[RunSummary]) -> float | None:
    """Points above the run with the same seed beside it."""
    own = _best_personal(run)
    theirs = next((_best_personal(other) for other in base if other.seed == run.seed), None)
    return None if own is None or theirs is None else 100 * own - 100 * theirs


def _personal(run: RunSummary) -> dict[int, float]:
    """Accuracy of the clients' own models by round."""
    return {int(r["round"]): float(r["personal_accuracy"]) for r in run.records if "personal_accuracy" in r}


def _joining(run: RunSummary) -> list[float]:
    """Accuracy over the clients that train in the round which the evaluated models begin, round after round."""
    joining = {int(record["round"]): set(record["clients"]) for record in run.records}
    found = []
    for line in run.clients:
        table, then = line.get("personal"), joining.get(int(line["round"]) + 1)
        if table is None or then is None:
            continue
        lines = zip(table["clients"], table["samples"], table["accuracy"], strict=True)
        counted = [(samples, accuracy) for client, samples, accuracy in lines if client in then]
        if counted:
            found.append(sum(s * a for s, a in counted) / sum(s for s, _ in counted))
    return found


def _minutes(run: RunSummary) -> float | None:
    """Median minutes of training and server work in a round."""
    seconds = [float(line["train_seconds"] + line["server_seconds"]) for line in run.timings]
    return statistics.median(seconds) / 60 if seconds else None


def _total(run: RunSummary) -> float | None:
    """Minutes of training and server work until the round with the best personal accuracy is over."""
    scores = _personal(run)
    if not scores or not run.timings:
        return None
    last = max(scores, key=lambda number: scores[number])
    lines = [line for line in run.timings if line["round"] <= last]
    return float(sum(line["train_seconds"] + line["server_seconds"] for line in lines)) / 60


def _over(run: RunSummary, base: Sequence[RunSummary]) -> float | None:
    known = [minutes for other in base if (minutes := _minutes(other))]
    own = _minutes(run)
    return float(own / statistics.fmean(known)) if own and known else None


def _models(run: RunSummary, cell: Cell) -> float:
    """Bytes of the last round in models; by one client or by all of the round."""
    last = run.records[-1]
    name, spec = _model_of(run, cell)
    sent = (last["bytes_down"] + last["bytes_up"]) / (4 * _sizes(name, spec)[0])
    return float(sent / len(last["clients"]) if cell.measure.a_client else sent)


def _model_of(run: RunSummary, cell: Cell) -> tuple[str, DataSpec]:
    """The model's expression, and its data as far as it must know them; a stand-in for the paper's data may differ."""
    spec = FACTS[parse(cell.setting.data).name].spec
    if run.configuration["data"]["name"].startswith(("part", parse(cell.setting.data).name)):
        return str(run.configuration["model"]), spec
    return str(run.configuration["model"]), make_dataset(run.configuration["data"]["name"]).spec


@cache
def _sizes(model: str, spec: DataSpec) -> tuple[int, tuple[int, ...]]:
    """Floating-point numbers of a model, buffers included, and trainable ones of each of its blocks, from bottom to top."""
    module = build_model(model, spec, 0)
    own = {name: parameter.numel() for name, parameter in module.named_parameters()}
    blocks = tuple(sum(own[name] for name in names) for names in block_parameters(module))
    return Layout(module).size, blocks


def _weights(cell: Cell) -> int:
    """ALA learns one weight for each parameter of the p highest blocks."""
    ranges = int(parse(cell.algorithm).named["p"])
    _, blocks = _sizes(cell.setting.model, FACTS[parse(cell.setting.data).name].spec)
    return sum(blocks[-ranges:])


def _classes(run: RunSummary) -> float | None:
    held = [sum(count > 0 for count in counts) for counts in run.label_counts]
    return statistics.fmean(held) if held else None


SCORES = {
    "best": criterion("best"),
    "end": criterion("last", LAST),
    "personal": Criterion("best accuracy of the clients' own models", _best_personal),
    "joining": Criterion(
        "best accuracy of the joining clients' own models", lambda run: max(_joining(run), default=None)
    ),
}
"""What the runs of a cell are judged by, where its measure is an accuracy."""


def judged(cells: Sequence[Cell]) -> Criterion | None:
    """The score of the first of the cells whose measure is an accuracy; None where there is none."""
    return next((SCORES[cell.measure.kind] for cell in cells if cell.measure.kind in SCORES), None)
