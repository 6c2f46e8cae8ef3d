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
    """The cell's value over its `runs`, a seed each; `base` are those of its baseline, where it has one.

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
        return _reached([figures.rounds_to(run, target) for run in runs], runs, _percent(best))
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
    """The criterion of the first of the cells whose measure is an accuracy; None where there is none."""
    return next((CRITERIA[cell.measure.kind] for cell in cells if cell.measure.kind in CRITERIA), None)


def difference(here: Measured | None, paper: Printed | None) -> float | None:
    """What was measured minus what is printed."""
    if here is None or paper is None or here.mean is None or paper.mean is None:
        return None
    return here.mean - paper.mean


def deviations(here: Measured | None, paper: Printed | None) -> float | None:
    """The difference in standard deviations, d / sqrt(s_paper^2 + s_here^2), of those that are known; None where none is."""
    by = difference(here, paper)
    if by is None or here is None or paper is None:
        return None
    together = math.hypot(paper.std or 0.0, here.std or 0.0)
    return by / together if together > 0 else None


def _length(runs: Runs) -> int:
    return max(len(run.records) for run in runs)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _end(runs: Runs) -> Measured | None:
    """Mean over runs of the mean of the last evaluations, with the deviation within a run: sqrt(mean_r s_r^2)."""
    ends = [[100 * value for value in figures.accuracies(run)[-LAST:]] for run in runs]
    if not all(ends):
        return None
    mean = statistics.fmean(statistics.fmean(values) for values in ends)
    within = [statistics.variance(values) for values in ends if len(values) > 1]
    std = math.sqrt(statistics.fmean(within)) if within else None
    return Measured(mean, std, len(runs), len(runs), _length(runs))


def _reached(values: Sequence[float | None], runs: Runs, best: float | None = None) -> Measured:
    """A value that runs have only where they reached a target: no mean unless all did."""
    known = [value for value in values if value is not None]
    whole = len(known) == len(values)
    std = statistics.stdev(known) if whole and len(known) > 1 else None
    return Measured(statistics.fmean(known) if whole else None, std, len(values), len(known), _length(runs), best)


def _speedup(runs: Runs, base: Runs, target: float) -> Measured | None:
    """Rounds of the baseline's run with the same seed over a run's own."""
    theirs = {run.seed: figures.rounds_to(run, target) for run in base}
    pairs = [(theirs[run.seed], figures.rounds_to(run, target)) for run in runs if run.seed in theirs]
    return _reached([a / b if a is not None and b is not None else None for a, b in pairs], runs) if pairs else None


def _best_personal(run: RunSummary) -> float | None:
    return max(_personal(run).values(), default=None)


def _improvement(run: RunSummary, base: Runs) -> float | None:
    """Points above the baseline's run with the same seed."""
    own = _best_personal(run)
    theirs = next((_best_personal(other) for other in base if other.seed == run.seed), None)
    return None if own is None or theirs is None else 100 * own - 100 * theirs


def _personal(run: RunSummary) -> dict[int, float]:
    """Accuracy of the clients' own models by round."""
    return {int(r["round"]): float(r["personal_accuracy"]) for r in run.records if "personal_accuracy" in r}


def _best_joining(run: RunSummary) -> float | None:
    """Best accuracy of any round over the clients that train in the round which the evaluated models begin."""
    joining = {int(record["round"]): set(record["clients"]) for record in run.records}
    found = []
    for line in run.clients:
        table, then = line.get("personal"), joining.get(int(line["round"]) + 1, set())
        lines = [] if table is None else zip(table["clients"], table["samples"], table["accuracy"], strict=True)
        if counted := [(samples, accuracy) for client, samples, accuracy in lines if client in then]:
            found.append(sum(s * a for s, a in counted) / sum(s for s, _ in counted))
    return max(found, default=None)


def _seconds(line: Mapping[str, float]) -> float:
    """Of training and server work in a round."""
    return float(line["train_seconds"] + line["server_seconds"])


def _minutes(run: RunSummary) -> float | None:
    """Median minutes of a round."""
    return statistics.median(map(_seconds, run.timings)) / 60 if run.timings else None


def _total(run: RunSummary) -> float | None:
    """Minutes until the round with the best personal accuracy is over."""
    scores = _personal(run)
    if not scores or not run.timings:
        return None
    last = max(scores, key=lambda number: scores[number])
    return sum(_seconds(line) for line in run.timings if line["round"] <= last) / 60


def _slower(run: RunSummary, base: Runs) -> float | None:
    known = [minutes for other in base if (minutes := _minutes(other))]
    own = _minutes(run)
    return own / statistics.fmean(known) if own and known else None


def _models(run: RunSummary, cell: PaperCell) -> float:
    """Bytes of the last round in models; by one client or by all of the round."""
    last, name = run.records[-1], str(run.configuration["data"]["name"])
    data = parse(cell.setting.data).name
    spec = facts()[data].spec if name.startswith(("part", data)) else make_dataset(name).spec  # a stand-in may differ
    sent = (last["bytes_down"] + last["bytes_up"]) / (4 * _sizes(str(run.configuration["model"]), spec)[0])
    return float(sent / len(last["clients"]) if cell.measure.a_client else sent)


@cache
def _sizes(model: str, spec: DataSpec) -> tuple[int, tuple[int, ...]]:
    """Floating-point numbers of a model, buffers included, and trainable ones of each of its blocks, from bottom to top."""
    module = build_model(model, spec, 0)
    own = {name: parameter.numel() for name, parameter in module.named_parameters()}
    blocks = tuple(sum(own[name] for name in names) for names in block_parameters(module))
    return Layout(module).size, blocks


def _weights(cell: PaperCell) -> int:
    """ALA learns one weight for each parameter of the p highest blocks."""
    ranges = int(parse(cell.algorithm).named["p"])
    return sum(_sizes(cell.setting.model, facts()[parse(cell.setting.data).name].spec)[1][-ranges:])


def _classes(run: RunSummary) -> float | None:
    held = [sum(count > 0 for count in counts) for counts in run.label_counts]
    return statistics.fmean(held) if held else None


CRITERIA = {
    "best": criterion("best"),
    "end": criterion("last", LAST),
    "personal": Criterion("best accuracy of the clients' own models", _best_personal),
    "joining": Criterion("best accuracy of the joining clients' own models", _best_joining),
}
"""What the runs of a cell are judged by, where its measure is an accuracy."""
