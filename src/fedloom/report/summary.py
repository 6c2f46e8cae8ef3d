"""The figures of runs: accuracies, rounds and bytes to a target, means and standard deviations over
seeds.

Pure functions on the records of a run. The terminal's tables, the report and the files (CSV,
Markdown) all call them, so they cannot disagree. Accuracies are shares in [0, 1] everywhere; only
displayed text has per cent.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.fields import require_at_least, require_between
from fedloom.objectives import ACCURACY, Metric

if TYPE_CHECKING:
    import pandas

LAST = 10  # evaluations that `mean_of_last` averages by default

MEASURES = ("final", "best", "last", "personal")
"""Measures of methods: test accuracy after the last round, the best of any, the mean of the last
ones, or that of the clients' own models on their own test data.
"""

# costs until a target is reached, of which less is better
TO_TARGET = ("rounds", "bytes", "seconds")
REAL_SITES = "sites"  # key in the environment of a run with real sites as clients


@dataclass(frozen=True)
class RunSummary:
    """Records of one run (a method with one seed), for tables and figures.

    `records`, `timings` and `clients` are the lines of `metrics.jsonl`, `timings.jsonl` and
    `clients.jsonl`. `label_counts` holds the training samples `[clients][classes]` by the labels as
    the clients have them, of which `wrong_labels` are wrong. `client_names` are their names in the
    data. No key of the `configuration` is required. `recorded` has an entry for each recorder
    (`Recording.results`). Where the task's `metric` is not the accuracy, it stands in its place in
    everything below.
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
    client_names: Sequence[str] | None = None

    def client_name(self, client: int) -> str:
        """Return the name of a client in the data, or its number."""
        return str(client) if self.client_names is None else str(self.client_names[client])


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1 in the denominator; 0 for one value) over `count`
    seeds.
    """

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Return the spread of `values`; None when there are none."""
        if not values:
            return None
        # a diverged loss or an infinite figure has no deviation
        finite = all(map(math.isfinite, values))
        std = 0.0 if len(values) < 2 else statistics.stdev(values) if finite else math.nan
        return cls(statistics.fmean(values), std, len(values))


TargetValue = float | str
"""A value of the metric to reach, such as an accuracy of 0.8, or the limit of any figure: `loss <=
0.2`.
"""


@dataclass(frozen=True)
class Target:
    """A limit for a figure of the records: at least `value` if `upwards`, else at most."""

    figure: str
    value: float
    upwards: bool

    @classmethod
    def of(cls, target: TargetValue, metric: Metric) -> "Target":
        """Return the limit that a target describes.

        Args:
            target: A value of the metric, or text such as `loss <= 0.2`.
            metric: The metric of the task, which decides if more is better.

        Returns:
            The limit, in the units of the figure.

        Raises:
            InvalidValue: The text has another form, or a share is not in [0, 1].
        """
        if isinstance(target, str):
            match = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*", target)
            try:
                figure, sign, value = match.groups() if match else ("", "", "")
                limit = cls(figure, float(value), sign == ">=")
            except ValueError:
                raise InvalidValue(
                    f"targets: {quoted(target)} is neither a number nor a figure with its "
                    "limit, such as 'loss <= 0.2'"
                ) from None
        else:
            limit = cls(metric.name, float(target), metric.higher_is_better)
        if metric.share and metric.name in limit.figure:
            require_between(f"targets: {limit.figure}", limit.value, 0, 1)
        return limit

    def reached(self, record: Mapping[str, Any]) -> bool:
        """Return True if a round's record is within the limit."""
        value = record.get(self.figure)
        return value is not None and (value >= self.value if self.upwards else value <= self.value)


def figures_of(
    run: RunSummary, targets: Sequence[TargetValue] = (), evaluations: int = LAST
) -> dict[str, float | None]:
    """Return the figures of a run by their names in `comparison.csv`.

    `client_spread` and `client_worst` describe the clients' accuracies (see `personal`).

    Args:
        run: The run.
        targets: Targets to reach; each adds its rounds, bytes and seconds.
        evaluations: Number of evaluations that `mean_of_last` averages.

    Returns:
        Figures by name, such as `final` and `rounds_to_0.8`; None if a figure was not measured.
        Accuracies are shares, times are in seconds.
    """
    scores = {
        "final": final(run),
        "best": best(run),
        "mean_of_last": mean_of_last(run, evaluations),
        "personal": personal(run),
        "client_spread": personal(run, "_std"),
        "client_worst": personal(run, "_worst"),
    }
    costs = {
        f"{cost}_to_{target_key(target)}": measured(run, cost, target=target)
        for target in targets
        for cost in TO_TARGET
    }
    totals = {
        "bytes_down": bytes_down(run),
        "bytes_up": bytes_up(run),
        "seconds": seconds(run),
        "epsilon": epsilon(run),
        "simulated_seconds": simulated_seconds(run),
    }
    return {**scores, **costs, **totals}


def summarise(
    runs: Sequence[RunSummary], targets: Sequence[TargetValue] = (), evaluations: int = LAST
) -> "pandas.DataFrame":
    """Return a row for each method, in the order in which the methods first appear.

    Args:
        runs: Runs of one setting.
        targets: Limits; each has a column `reached_*` and one for each of the costs `TO_TARGET`.
        evaluations: Evaluations that `mean_of_last` averages.

    Returns:
        A frame by method. `seeds`, `rounds`, `reached_*` (seeds that reached a target) and `faults`
        are numbers; every other column, named as in `figures_of`, holds a `Spread` over the seeds,
        or None where no run has the figure.
    """
    import pandas

    require_at_least("last", evaluations, 1)
    rows = []
    for method, group in by_algorithm(runs).items():
        figures = [figures_of(run, targets, evaluations) for run in group]
        spreads = {
            name: Spread.of([float(value) for line in figures if (value := line[name]) is not None])
            for name in figures[0]
        }
        rounds = {key: spreads[f"rounds_to_{key}"] for key in map(target_key, targets)}
        rows.append(
            {
                "method": method,
                "seeds": len(group),
                "rounds": max(len(run.records) for run in group),
                **{
                    f"reached_{key}": spread.count if spread else 0
                    for key, spread in rounds.items()
                },
                **spreads,
                "faults": sum(len(faults(run)) for run in group),
            }
        )
    return pandas.DataFrame(rows, dtype=object).set_index("method")


def by_algorithm(runs: Sequence[RunSummary]) -> dict[str, list[RunSummary]]:
    """Return the runs of each method, methods in order of first appearance."""
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        groups.setdefault(run.algorithm, []).append(run)
    return groups


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one with dotted keys.

    Args:
        table: A table as in a configuration file.
        prefix: Beginning of all keys, with its dot.

    Returns:
        Values by keys such as `data.name`.
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            dotted(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {prefix + key: value}
        )
    return flat


def by_round(run: RunSummary, figure: str) -> dict[int, float]:
    """Return a figure of the records by round, where it was recorded.

    Args:
        run: The run.
        figure: Name of the figure in the records.

    Returns:
        Figures by the round's number, from 1. Rounds without the figure are missing.
    """
    return {int(r["round"]): float(r[figure]) for r in run.records if r.get(figure) is not None}


def accuracies(run: RunSummary) -> list[float]:
    """Return the test accuracy (or whatever the metric is) of every round that was evaluated, in
    order.
    """
    return list(by_round(run, run.metric.name).values())


def final(run: RunSummary) -> float | None:
    """Return the accuracy of the last evaluation; None when there is none."""
    return next(reversed(accuracies(run)), None)


def best(run: RunSummary) -> float | None:
    """Return the best accuracy of any evaluation. It is chosen on the test set, so it flatters a
    curve that jumps.
    """
    return run.metric.best(accuracies(run))


def mean_of_last(run: RunSummary, count: int = LAST) -> float | None:
    """Return the mean accuracy of the last evaluations.

    Args:
        run: The run.
        count: Number of evaluations. If the run has no more than these, its last tenth counts.

    Returns:
        A share in [0, 1], or the metric's value; None without an evaluation.
    """
    values = accuracies(run)
    return statistics.fmean(values[-averaged(run, count) :]) if values else None


def averaged(run: RunSummary, count: int) -> int:
    """Return the number of evaluations that `mean_of_last` averages.

    The mean of a whole curve would depend on its beginning.

    Args:
        run: The run.
        count: Requested number of evaluations.

    Returns:
        At least 1.
    """
    evaluations = len(accuracies(run))
    return count if count < evaluations else max(1, evaluations // 10)


def personal(run: RunSummary, statistic: str = "") -> float | None:
    """Return the accuracy of each client's own model on its own test data.

    The last such evaluation counts. Where personal models were not evaluated, the global model
    takes their place.

    Args:
        run: The run.
        statistic: "" for the mean over all samples, "_std" and "_worst" for figures of the clients
            (`Tally.figures`).

    Returns:
        A share in [0, 1], or the metric's value; None without an evaluation.
    """
    for name in ("personal", "client"):
        key = f"{name}_{run.metric.name}{statistic}"
        if scores := [record[key] for record in run.records if key in record]:
            return float(scores[-1])
    return None


def measured(
    run: RunSummary, measure: str, evaluations: int = LAST, target: TargetValue | None = None
) -> float | None:
    """Return one of the `MEASURES` of a run, or its cost `TO_TARGET`.

    Args:
        run: The run.
        measure: One of `MEASURES` or `TO_TARGET`.
        evaluations: Number of evaluations that `last` averages.
        target: The target of a cost.

    Returns:
        The figure; None if it was not measured, the target was never reached, or a cost has no
        target.
    """
    if measure in TO_TARGET:
        cost = {"rounds": rounds_to, "bytes": bytes_to, "seconds": seconds_to}[measure]
        return None if target is None else cost(run, target)
    if measure == "last":
        return mean_of_last(run, evaluations)
    return {"final": final, "best": best, "personal": personal}[measure](run)


def target_key(target: TargetValue) -> str:
    """Return a target as the key of a file: `0.8`, `loss <= 0.2`."""
    return target if isinstance(target, str) else f"{target:g}"


def rounds_to(run: RunSummary, target: TargetValue) -> int | None:
    """Return the first round as good as `target`, without smoothing.

    Args:
        run: The run.
        target: A value of the metric, or the limit of a figure.

    Returns:
        The round's number, from 1; None if no round reached the target.
    """
    limit = Target.of(target, run.metric)
    return next((int(record["round"]) for record in run.records if limit.reached(record)), None)


def bytes_to(run: RunSummary, target: TargetValue) -> int | None:
    """Return the bytes down and up until the round that first reaches `target` is over.

    Args:
        run: The run.
        target: As in `rounds_to`.

    Returns:
        Bytes of all clients; None if no round reached the target.
    """
    reached = rounds_to(run, target)
    return None if reached is None else int(_total(run.records, reached, "bytes_down", "bytes_up"))


def seconds_to(run: RunSummary, target: TargetValue) -> float | None:
    """Return the seconds until the round that first reaches `target` is over.

    Args:
        run: The run.
        target: As in `rounds_to`.

    Returns:
        Seconds of the simulated clock if the run has one, else of this machine; None if no round
        reached the target.
    """
    reached = rounds_to(run, target)
    if reached is not None and simulated_seconds(run) is not None:
        return next(
            float(record["simulated_seconds"])
            for record in run.records
            if record["round"] == reached
        )
    return None if reached is None or not run.timings else _total(run.timings, reached, "seconds")


def simulated_seconds(run: RunSummary) -> float | None:
    """Return the seconds of the whole run by the simulated clock; None where there is none."""
    return _final_figure(run, "simulated_seconds")


def epsilon(run: RunSummary) -> float | None:
    """Return the differential privacy that the run has used up, where it accounts for it."""
    return _final_figure(run, "epsilon")


def _final_figure(run: RunSummary, name: str) -> float | None:
    figure: float | None = run.records[-1].get(name) if run.records else None
    return figure


def bytes_down(run: RunSummary) -> int:
    """Return the bytes sent to clients in the whole run."""
    return int(_total(run.records, None, "bytes_down"))


def bytes_up(run: RunSummary) -> int:
    """Return the bytes received from clients in the whole run."""
    return int(_total(run.records, None, "bytes_up"))


def seconds(run: RunSummary) -> float | None:
    """Return the seconds of the whole run, evaluation included; None when no times were
    recorded.
    """
    return _total(run.timings, None, "seconds") if run.timings else None


def elapsed_seconds(runs: Sequence[RunSummary]) -> float | None:
    """Return the time in which any of the runs was under way, those side by side counted once; None
    where rounds have no date.
    """
    lines = [line for run in runs for line in run.timings]
    if not lines or any("ended" not in line for line in lines):
        return None
    total, last = 0.0, -math.inf
    for began, ended in sorted((line["ended"] - line["seconds"], line["ended"]) for line in lines):
        total += max(0.0, ended - max(began, last))
        last = max(last, ended)
    return total


def faults(run: RunSummary) -> list[tuple[int, int, str]]:
    """Return round, client and reason of every client that dropped out, failed or was refused."""
    return [
        (int(record["round"]), int(fault["client"]), str(fault["reason"]))
        for record in run.records
        for fault in record.get("faults", ())
    ]


def _total(lines: Sequence[dict[str, Any]], until: int | None, *names: str) -> float:
    counted = (line for line in lines if until is None or line["round"] <= until)
    return sum(float(line.get(name, 0)) for line in counted for name in names)
