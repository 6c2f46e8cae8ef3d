"""The figures of runs: accuracies, rounds and bytes to a target, means and standard deviations over seeds.

Pure functions on the records of a run. The terminal's tables, the report and the files (CSV, Markdown) all call them, so
they cannot disagree. Accuracies are shares in [0, 1] everywhere; only displayed text has per cent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedloom.config.checks import require_at_least, require_share
from fedloom.objectives import ACCURACY, Metric

LAST = 10
"""Evaluations that `mean_of_last` averages unless told otherwise."""

MEASURES = ("final", "best", "last", "personal")
"""What methods are judged by: test accuracy after the last round, the best of any, the mean of the last ones, or that of the
clients' own models on their own test data."""


@dataclass(frozen=True)
class RunSummary:
    """What one run (a method with one seed) has recorded, for tables and figures.

    `records` and `timings` are the lines of `metrics.jsonl` and `timings.jsonl`, in the order of the rounds.
    `label_counts` holds the training samples of each client and class, `[clients][classes]` (empty when unknown);
    `configuration` is what was run and `environment` the versions and the machine. Of the configuration no key is required;
    the report shows `command`, the line that repeats the run, and uses `targets` and `rounds`. `recorded` holds
    what was recorded on request (`Recording.results`), one entry a recorder, and `clients` the lines of `clients.jsonl`: the
    accuracy of each client in the rounds in which the clients' own models were evaluated. Label counts are of the labels as the
    clients have them, of which `wrong_labels` are wrong (label noise). Runs are judged by the task's `metric`; where it is not
    the accuracy, it stands in its place in everything below.
    """

    algorithm: str
    seed: int
    records: list[dict[str, Any]]
    timings: list[dict[str, Any]] = field(default_factory=list)
    label_counts: list[list[int]] = field(default_factory=list)
    class_names: list[str] | None = None
    configuration: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    recorded: list[dict[str, Any]] = field(default_factory=list)
    clients: list[dict[str, Any]] = field(default_factory=list)
    wrong_labels: int = 0
    metric: Metric = ACCURACY


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1 in the denominator; 0 for one value) over `count` seeds."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """The spread of `values`; None when there are none."""
        if not values:
            return None
        return cls(statistics.fmean(values), _deviation(values), len(values))


@dataclass(frozen=True)
class Reach:
    """How fast a target accuracy was reached: spreads over the `reached` of `seeds` runs that reached it, None when none did."""

    target: float
    rounds: Spread | None
    bytes: Spread | None
    seconds: Spread | None
    reached: int
    seeds: int


@dataclass(frozen=True)
class Row:
    """One method's line of a comparison; every spread is over its seeds and None where nothing was measured.

    `personal` is the accuracy of the clients' models on their own test data after the last round, `client_std` the standard
    deviation of the clients' accuracies and `client_worst` the mean of the lowest tenth of them (see `personal`). `epsilon` is
    the differential privacy used up.
    """

    algorithm: str
    seeds: int
    rounds: int
    final: Spread | None
    best: Spread | None
    last: Spread | None
    reaches: tuple[Reach, ...]
    bytes_down: Spread | None
    bytes_up: Spread | None
    seconds: Spread | None
    faults: int
    personal: Spread | None = None
    client_std: Spread | None = None
    client_worst: Spread | None = None
    metric: Metric = ACCURACY
    epsilon: Spread | None = None


def summarise(runs: Sequence[RunSummary], targets: Sequence[float] = (), last: int = LAST) -> list[Row]:
    """One `Row` a method, in the order in which the methods first appear in `runs`.

    `targets` are values of the metric, test accuracies in (0, 1]; `last` is the number of evaluations in the mean of the last
    ones. Raises `InvalidValue` for a target that is not such a share (a per cent, for instance) or `last` below 1.
    """
    for target in targets if all(run.metric.share for run in runs) else ():
        require_share(f"target {ACCURACY.noun}", target)
    require_at_least("last", last, 1)
    return [_row(name, group, targets, last) for name, group in by_algorithm(runs).items()]


def by_algorithm(runs: Sequence[RunSummary]) -> dict[str, list[RunSummary]]:
    """The runs of each method, methods in order of first appearance."""
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        groups.setdefault(run.algorithm, []).append(run)
    return groups


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def values(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A figure of every round that it was recorded in, in order."""
    return [float(record[name]) for record in records if record.get(name) is not None]


def accuracies(run: RunSummary) -> list[float]:
    """Test accuracy (or whatever the metric is) of every round that was evaluated, in order."""
    return values(run.records, run.metric.name)


def final(run: RunSummary) -> float | None:
    """Accuracy of the last evaluation; None when there is none."""
    values = accuracies(run)
    return values[-1] if values else None


def best(run: RunSummary) -> float | None:
    """Best accuracy of any evaluation. It is chosen on the test set, so it flatters a curve that jumps."""
    return run.metric.best(accuracies(run))


def mean_of_last(run: RunSummary, count: int = LAST) -> float | None:
    """Mean accuracy of the last `count` evaluations (of all, when there are fewer)."""
    values = accuracies(run)[-count:]
    return statistics.fmean(values) if values else None


def personal(run: RunSummary, part: str = "") -> float | None:
    """Accuracy of each client's own model on its own test data at the last such evaluation; None when there is none.

    `part` is "" for the mean over all samples, "_std" for the population standard deviation of the clients' accuracies and
    "_worst" for the mean over the tenth of the clients with the lowest (`Tally.figures`, every client counted alike). Where
    personal models were not evaluated, the global model on the clients' own test data takes their place.
    """
    for name in ("personal", "client"):
        found = [record[key] for record in run.records if (key := f"{name}_{run.metric.name}{part}") in record]
        if found:
            return float(found[-1])
    return None


def measured(run: RunSummary, measure: str, last: int = LAST) -> float | None:
    """One of the `MEASURES` of a run."""
    if measure == "last":
        return mean_of_last(run, last)
    return {"final": final, "best": best, "personal": personal}[measure](run)


def rounds_to(run: RunSummary, target: float) -> int | None:
    """First round, counted from 1, whose test accuracy is as good as `target`, without smoothing; None if never."""
    found = ((int(record["round"]), record.get(run.metric.name)) for record in run.records)
    reached = (number for number, value in found if value is not None and run.metric.reaches(value, target))
    return next(reached, None)


def bytes_to(run: RunSummary, target: float) -> int | None:
    """Bytes down and up until the round that first reaches `target` is over; None if never."""
    reached = rounds_to(run, target)
    return None if reached is None else int(_total(run.records, ("bytes_down", "bytes_up"), reached))


def seconds_to(run: RunSummary, target: float) -> float | None:
    """Seconds until the round that first reaches `target` is over; None if never or when no times were kept."""
    reached = rounds_to(run, target)
    return None if reached is None or not run.timings else _total(run.timings, ("seconds",), reached)


def epsilon(run: RunSummary) -> float | None:
    """The differential privacy that the run has used up, where it accounts for it."""
    found: float | None = run.records[-1].get("epsilon") if run.records else None
    return found


def bytes_down(run: RunSummary) -> int:
    """Bytes sent to clients in the whole run."""
    return int(_total(run.records, ("bytes_down",)))


def bytes_up(run: RunSummary) -> int:
    """Bytes received from clients in the whole run."""
    return int(_total(run.records, ("bytes_up",)))


def seconds(run: RunSummary) -> float | None:
    """Seconds of the whole run, evaluation included; None when no times were kept."""
    return _total(run.timings, ("seconds",)) if run.timings else None


def faults(run: RunSummary) -> list[tuple[int, int, str]]:
    """Every client that dropped out, failed or was refused: (round, client, reason)."""
    return [
        (int(r["round"]), int(one["client"]), str(one["reason"])) for r in run.records for one in r.get("faults", ())
    ]


def _total(lines: Sequence[dict[str, Any]], names: Sequence[str], until: int | None = None) -> float:
    """Sum of the named figures over the rounds up to `until`."""
    chosen = (line for line in lines if until is None or line["round"] <= until)
    return sum(float(line.get(name, 0)) for line in chosen for name in names)


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    # a diverged loss or an infinite figure has no deviation
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _row(name: str, runs: Sequence[RunSummary], targets: Sequence[float], last: int) -> Row:
    def spread(measure: Callable[[RunSummary], float | None]) -> Spread | None:
        found = (measure(run) for run in runs)
        return Spread.of([float(value) for value in found if value is not None])

    def reach(target: float) -> Reach:
        return Reach(
            target,
            spread(lambda run: rounds_to(run, target)),
            spread(lambda run: bytes_to(run, target)),
            spread(lambda run: seconds_to(run, target)),
            sum(rounds_to(run, target) is not None for run in runs),
            len(runs),
        )

    return Row(
        name,
        len(runs),
        max((len(run.records) for run in runs), default=0),
        spread(final),
        spread(best),
        spread(lambda run: mean_of_last(run, last)),
        tuple(reach(target) for target in targets),
        spread(bytes_down),
        spread(bytes_up),
        spread(seconds),
        sum(len(faults(run)) for run in runs),
        spread(personal),
        spread(lambda run: personal(run, "_std")),
        spread(lambda run: personal(run, "_worst")),
        runs[0].metric,
        spread(epsilon),
    )
