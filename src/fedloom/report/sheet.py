"""One setting of a comparison: a row for each method, and which of their differences are
significant.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedloom.objectives import ACCURACY, Metric
from fedloom.report.cells import (
    NEVER,
    SOME,
    Cell,
    Column,
    Filled,
    Table,
    comparison,
    score_cell,
    target_text,
)
from fedloom.report.significance import (
    Difference,
    comparisons,
    differences,
    seeds_needed,
    smallest_exact,
)
from fedloom.report.summary import (
    LAST,
    MEASURES,
    TO_TARGET,
    Row,
    RunSummary,
    Spread,
    TargetValue,
    accuracies,
    averaged,
    by_algorithm,
    measured,
    summarise,
)
from fedloom.report.units import byte_text

NOT_SIGNIFICANT, T_TEST_ONLY = "ⁿ", "ᵗ"
"""Follow an accuracy whose difference from the reference is not significant, or is so by the t-test
only.
"""

RANKED = 3  # settings from which on the ranks of a method have a mean

DIFFERENCE_HEADS = ("Difference", "95 % interval", "p (t), Holm", "p (exact), Holm", "Verdict")
"""Titles of the `difference_cells`: both p are corrected by Holm's method, the interval is not."""


@dataclass(frozen=True)
class Criterion:
    """A measure that runs are judged by: its name, its value for a run (None where it was not
    measured), and its metric.
    """

    name: str
    of: Callable[[RunSummary], float | None]
    metric: Metric = ACCURACY

    @property
    def title(self) -> str:
        """The name with a capital letter."""
        return self.name[0].upper() + self.name[1:]


@dataclass(frozen=True)
class Sheet:
    """The methods of one setting. `tests` holds, by measure, the differences from the reference
    (`against`); `last` is the number of evaluations that are averaged, `requested` the number that
    was asked for.
    """

    rows: tuple[Row, ...]
    tests: Mapping[str, Sequence[Difference]]
    last: int = LAST
    against: str = "best"
    measure: str = "last"  # the one that a single table shows
    setting: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    requested: int = LAST

    @property
    def marks(self) -> dict[str, dict[str, str]]:
        """Signs behind accuracies, by measure and method; none where the difference is significant
        or not tested.
        """
        signs = {"t-test only": T_TEST_ONLY, "not significant": NOT_SIGNIFICANT}
        return {
            name: {test.method: signs.get(test.verdict, "") for test in tests}
            for name, tests in self.tests.items()
        }

    @property
    def criterion(self) -> Criterion:
        """The measure as a criterion of single runs."""
        target = self.rows[0].reaches[0].target if self.rows and self.rows[0].reaches else None
        return criterion(self.measure, self.last, self.metric, target)

    @property
    def metric(self) -> Metric:
        """The metric that the methods are judged by."""
        return self.rows[0].metric if self.rows else ACCURACY

    @property
    def table(self) -> Table:
        """The comparison of the methods, marked."""
        return comparison(self.rows, self.marks, self.last)

    @property
    def differences(self) -> tuple[str, Table]:
        """The title and the table of the differences in the measure, without lines where nothing
        was tested.
        """
        tests, name, metric = self.tests[self.measure], self.criterion.name, self.criterion.metric
        title = (
            f"Differences from {tests[0].other} in the {name}{', in points' * metric.share}"
            if tests
            else ""
        )
        lines = [(test.method, *difference_cells(test, metric)) for test in tests]
        columns = tuple(Column(head, order="") for head in ("Method", *DIFFERENCE_HEADS))
        return title, Table(
            columns, tuple(tuple(Cell(text, None) for text in line) for line in lines)
        )


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
    """Compare the runs of one setting, which is labelled `setting` and sets the configuration keys
    `changes`.

    The reference of the differences is the `best` method or the `first`; a single table shows the
    `measure`.
    """
    rows = summarise(runs, targets, last)
    requested, last = (
        last,
        max((averaged(run, last) for run in runs if accuracies(run)), default=last),
    )
    metric, target = rows[0].metric if rows else ACCURACY, next(iter(targets), None)
    tests: dict[str, Sequence[Difference]] = {}
    for name in dict.fromkeys((*MEASURES, measure)):
        judge = criterion(name, last, metric, target)
        values = {
            method: {run.seed: value for run in group if (value := judge.of(run)) is not None}
            for method, group in by_algorithm(runs).items()
            if name not in TO_TARGET or all(judge.of(run) is not None for run in group)
        }
        tests[name] = [
            test
            for test in differences(values, against, judge.metric.higher_is_better)
            if test.seeds > 1
        ]
    return Sheet(
        tuple(rows), tests, last, against, measure, setting, dict(changes or {}), requested
    )


def measure_name(measure: str, evaluations: int, metric: Metric = ACCURACY) -> str:
    """Return the name of one of the `MEASURES`: `mean accuracy of the last 10 evaluations`."""
    names = {
        "final": f"{metric.noun} after the last round",
        "best": f"best {metric.noun} of any evaluation",
        "personal": f"{metric.noun} of the clients' own models",
    }
    return names.get(measure, f"mean {metric.noun} of the {_last(evaluations)}")


def _last(evaluations: int) -> str:
    return f"last {evaluations} evaluations" if evaluations > 1 else "last evaluation"


def criterion(
    measure: str = "last",
    evaluations: int = LAST,
    metric: Metric = ACCURACY,
    target: TargetValue | None = None,
) -> Criterion:
    """Return one of the `MEASURES`, or of the costs `TO_TARGET`, as a criterion."""
    if measure in TO_TARGET and target is not None:
        name = f"{measure} to {target_text(metric, target)}"
        return Criterion(
            name, lambda run: measured(run, measure, evaluations, target), Metric(measure, name)
        )
    name = measure_name(measure, evaluations, metric)
    return Criterion(name, lambda run: measured(run, measure, evaluations), metric)


def explained(sheets: Sequence[Sheet]) -> list[str]:
    """Return the meaning of the figures, in the same words on the page, on the terminal and in the
    files.
    """
    rows = [row for sheet in sheets for row in sheet.rows]
    if not rows:
        return []
    counts = sorted({choose(row.seeds for row in rows) for choose in (min, max)})
    seeds = (
        ""
        if counts == [1]
        else f"Mean ± standard deviation over {' to '.join(map(str, counts))} seeds. "
    )
    texts = [
        f"{seeds}{rows[0].metric.title} on the test set: final after {max(row.rounds for row in rows)} rounds, best of any "
        f"evaluation (chosen on the test data), mean of the {_last(sheets[0].last)}."
    ]
    if sheets[0].last < sheets[0].requested and rows[0].rounds > 1:
        texts.append(
            f"Warning: last = {sheets[0].requested} covers every evaluation, the first ones too: the mean is over the last "
            "tenth of them instead."
        )
    if any(row.personal is not None for row in rows):
        texts.append(
            f"Clients' own: {rows[0].metric.noun} of each client's own model on its own test data, over all samples (where not "
            "evaluated, of the global model); std over clients: unweighted; worst tenth: mean over that tenth of the clients."
        )
    if rows[0].reaches:
        faster = f"; 2×: in half as many rounds as {rows[0].algorithm}" if len(rows) > 1 else ""
        texts.append(
            "Rounds, bytes (down and up) and seconds until the first evaluation that is as good as the target; "
            f"{NEVER} never reached, {SOME} not with every seed{faster}."
        )
    return texts


def reading(sheets: Sequence[Sheet]) -> list[str]:
    """Return how differences are tested and what verdicts and marks mean; empty where nothing is
    tested.
    """
    tested = [sheet for sheet in sheets if any(sheet.tests.values())]
    if not tested:
        return []
    family = max(comparisons(len(sheet.rows), sheet.against) for sheet in tested)
    seeds = min(test.seeds for sheet in tested for tests in sheet.tests.values() for test in tests)
    pairs = "1 comparison" if family == 1 else f"{family} comparisons"
    reference = "method with the best mean" if tested[0].against == "best" else "first method"
    text = [
        f"Differences from the {reference} are paired by seed and tested at the 5 % level, p-values corrected by Holm's method "
        f"for {pairs}; 95 % intervals are the t-test's, uncorrected. Significant: by the exact sign-flip test and by the paired "
        f"t-test. t-test only ({T_TEST_ONLY}): with too few seeds for the exact test to reach 5 %. Not significant "
        f"({NOT_SIGNIFICANT}): all others. Equal: the same figure with every seed."
    ]
    if family * smallest_exact(seeds) >= 0.05:
        text.append(
            f"With {seeds} seeds the exact test cannot reach significance: its p is at least {smallest_exact(seeds):.2g}. "
            f"It takes {seeds_needed(family)} seeds here."
        )
    return text


def faults_in(sheet: Sheet) -> str:
    """Return how often a client was absent, failed or was refused in this setting; empty where none
    ever was.
    """
    count = sum(row.faults for row in sheet.rows)
    return (
        f"{'once' if count == 1 else f'{count:,} times'} a client was absent, failed or was refused"
        if count
        else ""
    )


def overall(sheets: Sequence[Sheet]) -> Table:
    """Return a table of one measure of every method (a line) in every setting (a column).

    From three settings on, the last column is the mean of a method's ranks, without settings in
    which some method has no value; a method that did not reach the target with every seed comes
    last.
    """
    from scipy.stats import rankdata

    methods = list(dict.fromkeys(row.algorithm for sheet in sheets for row in sheet.rows))
    columns: list[Filled] = [
        (Column("Method", order="ascending"), [Cell(method, method) for method in methods])
    ]
    ranks = []
    for sheet in sheets:
        metric, marks = sheet.criterion.metric, sheet.marks[sheet.measure]
        by_method = {row.algorithm: spread_of(row, sheet.measure) for row in sheet.rows}
        spreads = [by_method.get(method) for method in methods]
        cells = [
            score_cell(spread, metric, marks.get(name, ""))
            for name, spread in zip(methods, spreads, strict=True)
        ]
        values = [
            str(value).lower() if isinstance(value, bool) else str(value)
            for value in sheet.changes.values()
        ]
        best, sign = ("largest", -1) if metric.higher_is_better else ("smallest", 1)
        columns.append((Column("\n".join(values), best), cells))
        if sheet.measure in TO_TARGET or all(spreads):
            ranks.append(
                rankdata([sign * spread.mean if spread else math.inf for spread in spreads])
            )
    if len(sheets) >= RANKED:
        means = [
            sum(float(rank[k]) for rank in ranks) / len(ranks) if ranks else None
            for k in range(len(methods))
        ]
        cells = [Cell("–" if mean is None else f"{mean:.1f}", mean) for mean in means]
        columns.append((Column("Mean rank", "smallest", "ascending"), cells))
    return Table.of(columns)


def caption(sheets: Sequence[Sheet]) -> str:
    """Return the caption of the table over several settings."""
    unit = ", in per cent" if sheets[0].criterion.metric.share else ""
    ranks = " Rank 1 is the best." if len(sheets) >= RANKED else ""
    return f"{sheets[0].criterion.title}{unit}, by {', '.join(keys(sheets))}.{ranks}"


def difference_cells(test: Difference, metric: Metric) -> list[str]:
    """Return difference and interval, of shares in points, corrected p of both tests (or –), and
    the verdict.
    """

    def signed(value: float) -> str:
        if metric.name == "bytes":
            return f"{'+' if value >= 0 else '-'}{byte_text(abs(value))}"
        return f"{100 * value:+.2f}" if metric.share else f"{value:+.3g}"

    interval = (
        "–"
        if test.low is None or test.high is None
        else f"{signed(test.low)} to {signed(test.high)}"
    )
    return [
        signed(test.mean),
        interval,
        p_text(test.t_test_corrected),
        p_text(test.exact_corrected),
        test.verdict,
    ]


def p_text(p: float | None) -> str:
    """Return a p-value with two digits; a dash where it is undefined."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}" if p < 0.995 else "1"


def keys(sheets: Sequence[Sheet]) -> list[str]:
    """Return the configuration keys that the settings vary."""
    return list(dict.fromkeys(key for sheet in sheets for key in sheet.changes))


def spread_of(row: Row, measure: str) -> Spread | None:
    """Return one of the `MEASURES` of a method, or its cost `TO_TARGET`, the first, only where
    every seed reached that.
    """
    if measure in TO_TARGET:
        reach = next(iter(row.reaches), None)
        return None if reach is None or reach.reached < reach.seeds else getattr(reach, measure)
    spread: Spread | None = getattr(row, measure)
    return spread
