"""One setting of a comparison: a row for each method, and which of their differences are significant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.objectives import ACCURACY, Metric
from fedloom.report.cells import Cell, Column, Table, comparison, score_cell, target_text
from fedloom.report.significance import Difference, comparisons, differences, seeds_needed, smallest_exact
from fedloom.report.summary import (
    LAST,
    MEASURES,
    TO_TARGET,
    Row,
    RunSummary,
    Spread,
    TargetValue,
    by_algorithm,
    measured,
    summarise,
)
from fedloom.report.units import byte_text

NOT_SIGNIFICANT, T_TEST_ONLY = "ⁿ", "ᵗ"
"""Follow an accuracy whose difference from the reference is not significant, or is so by the t-test only."""

DIFFERENCE_HEADS = ("Difference", "95 % interval", "p (t), Holm", "p (exact), Holm", "Verdict")
"""Titles of the `difference_cells`: both p are corrected by Holm's method, the interval is not."""


@dataclass(frozen=True)
class Criterion:
    """What runs are judged by: its name, its value for a run (None where it was not measured), and the metric that this is of."""

    name: str
    of: Callable[[RunSummary], float | None]
    metric: Metric = ACCURACY

    @property
    def title(self) -> str:
        """The name with a capital letter."""
        return self.name[0].upper() + self.name[1:]


@dataclass(frozen=True)
class Sheet:
    """The methods of one setting. `tests` holds, by measure, the differences from the reference (`against`)."""

    rows: tuple[Row, ...]
    tests: Mapping[str, Sequence[Difference]]
    last: int = LAST
    against: str = "best"
    measure: str = "last"  # the one that a single table shows
    setting: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def marks(self) -> dict[str, dict[str, str]]:
        """What follows an accuracy, by measure and method; nothing where the difference is significant or not tested."""
        signs = {"t-test only": T_TEST_ONLY, "not significant": NOT_SIGNIFICANT}
        return {name: {one.method: signs.get(one.verdict, "") for one in found} for name, found in self.tests.items()}

    @property
    def criterion(self) -> Criterion:
        """The measure as a criterion for single runs."""
        target = self.rows[0].reaches[0].target if self.rows and self.rows[0].reaches else None
        return criterion(self.measure, self.last, self.metric, target)

    @property
    def metric(self) -> Metric:
        """What the methods are judged by."""
        return self.rows[0].metric if self.rows else ACCURACY

    @property
    def table(self) -> Table:
        """The comparison of the methods, marked."""
        return comparison(self.rows, self.marks, self.last)


def sheet(
    runs: Sequence[RunSummary],
    targets: Sequence[TargetValue] = (),
    *,
    last: int = LAST,
    against: str = "best",
    measure: str = "last",
    setting: str = "",
    changes: Mapping[str, Any] | None = None,
) -> Sheet:
    """The sheet of the runs of one setting. Raises as `summarise` does."""
    rows = summarise(runs, targets, last)
    metric, target = rows[0].metric if rows else ACCURACY, next(iter(targets), None)
    tests: dict[str, Sequence[Difference]] = {}
    for name in dict.fromkeys((*MEASURES, measure)):
        judged = criterion(name, last, metric, target)
        values = {
            method: {run.seed: value for run in group if (value := judged.of(run)) is not None}
            for method, group in by_algorithm(runs).items()
            if name not in TO_TARGET or all(judged.of(run) is not None for run in group)
        }
        found = differences(values, against, judged.metric.higher_is_better)
        tests[name] = [one for one in found if one.seeds > 1]
    return Sheet(tuple(rows), tests, last, against, measure, setting, dict(changes or {}))


def words(measure: str, last: int, metric: Metric = ACCURACY) -> str:
    """What a measure is: `mean accuracy of the last 10 evaluations`."""
    named = {
        "final": f"{metric.noun} after the last round",
        "best": f"best {metric.noun} of any evaluation",
        "personal": f"{metric.noun} of the clients' own models",
    }
    return named.get(measure, f"mean {metric.noun} of the last {last} evaluations")


def criterion(
    measure: str = "last", last: int = LAST, metric: Metric = ACCURACY, target: TargetValue | None = None
) -> Criterion:
    """One of the `MEASURES` as a criterion, or what it takes `TO_TARGET`."""
    if measure in TO_TARGET and target is not None:
        name = f"{measure} to {target_text(metric, target)}"
        return Criterion(name, lambda run: measured(run, measure, last, target), Metric(measure, name))
    return Criterion(words(measure, last, metric), lambda run: measured(run, measure, last), metric)


def reading(sheets: Sequence[Sheet]) -> list[str]:
    """How differences are tested, what the verdicts and their marks mean, and what so few seeds cannot detect: the same text on
    the page, on the terminal and in the files. Empty where nothing is tested."""
    tested = [one for one in sheets if any(one.tests.values())]
    if not tested:
        return []
    first = tested[0]
    family = max(comparisons(len(one.rows), one.against) for one in tested)
    seeds = min(found.seeds for one in tested for tests in one.tests.values() for found in tests)
    pairs = "1 comparison" if family == 1 else f"{family} comparisons"
    reference = "method with the best mean" if first.against == "best" else "first method"
    text = [
        f"Differences from the {reference} are paired by seed and tested at the 5 % level, p-values corrected by Holm's method "
        f"for {pairs}. Significant: by the exact sign-flip test, which assumes no distribution, and by the paired t-test, which "
        f"assumes normal differences (and is undefined where all are equal). t-test only ({T_TEST_ONLY}): by the t-test, with "
        f"too few seeds for the exact test to reach 5 %. Not significant ({NOT_SIGNIFICANT}): all others. Equal: the same "
        "figure with every seed. The 95 % interval of a mean difference is that of the t-test, of each by itself, uncorrected."
    ]
    if family * smallest_exact(seeds) >= 0.05:
        text.append(
            f"With {seeds} seeds the exact test cannot reach significance: its p is at least {smallest_exact(seeds):.2g}. "
            f"It takes {seeds_needed(family)} seeds here."
        )
    return text


def faults_in(one: Sheet) -> str:
    """How often a client was absent, failed or was refused in this setting; empty where none ever was."""
    count = sum(row.faults for row in one.rows)
    return f"{'once' if count == 1 else f'{count:,} times'} a client was absent, failed or was refused" if count else ""


def overall(sheets: Sequence[Sheet]) -> Table:
    """One measure of every method (a line) in every setting (a column), and from three settings on the mean of a method's ranks.

    Rank 1 is the best mean; equal means share the mean of their ranks. Settings in which some method has no value are
    left out of the ranks; a method that did not reach the target with every seed comes last.
    """
    methods = list(dict.fromkeys(row.algorithm for one in sheets for row in one.rows))
    found = [{row.algorithm: spread_of(row, one.measure) for row in one.rows} for one in sheets]
    metrics = [one.criterion.metric for one in sheets]
    known = []
    for one, metric, spreads in zip(sheets, metrics, found, strict=True):
        sign, never = -1 if metric.higher_is_better else 1, one.measure in TO_TARGET
        each = [spreads.get(method) for method in methods]
        known.append([sign * spread.mean if spread else math.inf for spread in each if spread or never])
    whole = [means for means in known if len(means) == len(methods)]
    ranks = [_ranks(means) for means in whole]
    columns = [
        Column("Method", order="ascending"),
        *(
            Column(_heading(one.changes), "largest" if metric.higher_is_better else "smallest")
            for one, metric in zip(sheets, metrics, strict=True)
        ),
    ]
    if _ranked(sheets):
        columns.append(Column("Mean rank", "smallest", "ascending"))
    lines = []
    for k, method in enumerate(methods):
        cells = [
            score_cell(spreads.get(method), metric, one.marks[one.measure].get(method, ""))
            for one, metric, spreads in zip(sheets, metrics, found, strict=True)
        ]
        if _ranked(sheets):
            rank = sum(float(one[k]) for one in ranks) / len(ranks) if ranks else None
            cells.append(Cell("–" if rank is None else f"{rank:.1f}", rank))
        lines.append((Cell(method, method), *cells))
    return Table(tuple(columns), tuple(lines))


def _ranked(sheets: Sequence[Sheet]) -> bool:
    """Whether the settings are enough for the mean of a method's ranks to tell anything."""
    return len(sheets) > 2


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """The rank of each value, from 1 on; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared: npt.NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return shared[inverse]


def caption(sheets: Sequence[Sheet]) -> str:
    """What the table over several settings shows."""
    unit = ", in per cent" if sheets[0].criterion.metric.share else ""
    ranks = " Rank 1 is the best." if _ranked(sheets) else ""
    return f"{sheets[0].criterion.title}{unit}, by {', '.join(keys(sheets))}.{ranks}"


def difference_title(one: Sheet) -> str:
    """What the table of a sheet's differences shows."""
    return f"Differences in the {one.criterion.name}{', in points' if one.criterion.metric.share else ''}"


def difference_cells(found: Difference, metric: Metric) -> list[str]:
    """Difference and interval, of shares in points, corrected p of both tests, and the verdict."""

    def signed(value: float) -> str:
        if metric.name == "bytes":
            return f"{'+' if value >= 0 else '-'}{byte_text(abs(value))}"
        return f"{100 * value:+.2f}" if metric.share else f"{value:+.3g}"

    interval = "–" if found.low is None or found.high is None else f"{signed(found.low)} to {signed(found.high)}"
    tests = [p_text(found.t_test_corrected), p_text(found.exact_corrected)]
    return [signed(found.mean), interval, *tests, found.verdict]


def p_text(p: float | None) -> str:
    """A p with two digits: `0.031`, `< 0.001`, or – without one."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}" if p < 0.995 else "1"


def keys(sheets: Sequence[Sheet]) -> list[str]:
    """The configuration keys that the settings vary."""
    return list(dict.fromkeys(key for one in sheets for key in one.changes))


def _heading(changes: Mapping[str, Any]) -> str:
    """A setting's values, a line each."""
    return "\n".join(str(value).lower() if isinstance(value, bool) else str(value) for value in changes.values())


def spread_of(row: Row, measure: str) -> Spread | None:
    """One of the `MEASURES` of a method; what it takes `TO_TARGET`, the first, only where every seed reached that."""
    if measure in TO_TARGET:
        reach = next(iter(row.reaches), None)
        return None if reach is None or reach.reached < reach.seeds else getattr(reach, measure)
    spread: Spread | None = getattr(row, measure)
    return spread
