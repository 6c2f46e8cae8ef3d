"""One setting of a comparison: a row for each method, and which of their differences are
significant.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.objectives import ACCURACY, Metric
from fedloom.report.cells import (
    NEVER,
    SOME,
    Cell,
    Column,
    score_cell,
    table_of,
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
    REAL_SITES,
    TO_TARGET,
    RunSummary,
    Spread,
    Target,
    TargetValue,
    accuracies,
    averaged,
    by_algorithm,
    measured,
    summarise,
    target_key,
)
from fedloom.report.tuning_choice import TuningChoice
from fedloom.report.units import byte_text, time_text

if TYPE_CHECKING:
    import pandas

NOT_SIGNIFICANT, T_TEST_ONLY = "ⁿ", "ᵗ"
"""Mark an accuracy if its difference from the reference is not significant, or only by the t-test.
"""

RANKED = 3  # settings from which on the ranks of a method have a mean

DIFFERENCE_HEADS = ("Difference", "95 % interval", "p (t), Holm", "p (exact), Holm", "Verdict")
"""Titles of the `difference_cells`: both p are corrected by Holm's method, the interval is not."""


_BEST, _SMALLEST = ("largest", "descending"), ("smallest", "ascending")

_MEANS: dict[str, tuple[str, Callable[[float], str], str]] = {
    "epsilon": ("Epsilon", "{:.3g}".format, "ascending"),
    "simulated_seconds": ("Simulated time", time_text, "descending"),
    "bytes_down": ("Bytes down", byte_text, "descending"),
    "bytes_up": ("Bytes up", byte_text, "descending"),
    "seconds": ("Time", time_text, "descending"),
}
"""Columns of means: title, text of a value, and order."""

_OPTIONAL = ("epsilon", "simulated_seconds")  # columns that are left out where no run has a value


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
    """The comparison of the runs of one setting.

    The reference of the differences (`against`) is the `best` method or the `first`. A table over
    several settings shows the `measure`. The setting has a label and the configuration keys that it
    `changes`.
    """

    runs: Sequence[RunSummary]
    targets: Sequence[TargetValue] = ()
    last: int = LAST  # evaluations that were requested for the mean
    against: str = "best"
    measure: str = "last"
    setting: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, TuningChoice] = field(default_factory=dict)  # of methods that were tuned

    @cached_property
    def _groups(self) -> dict[str, list[RunSummary]]:
        return by_algorithm(self.runs)

    @cached_property
    def rows(self) -> "pandas.DataFrame":
        """The figures of each method (see `summarise`)."""
        return summarise(self.runs, self.targets, self.last)

    @cached_property
    def averaged(self) -> int:
        """The number of evaluations that the mean of the last ones covers."""
        counts = (averaged(run, self.last) for run in self.runs if accuracies(run))
        return max(counts, default=self.last)

    @property
    def metric(self) -> Metric:
        """The metric that the methods are judged by."""
        return self.runs[0].metric if self.runs else ACCURACY

    @property
    def criterion(self) -> Criterion:
        """The measure as a criterion of single runs."""
        return self._criterion(self.measure)

    def _criterion(self, measure: str) -> Criterion:
        return criterion(measure, self.averaged, self.metric, next(iter(self.targets), None))

    @cached_property
    def tests(self) -> Mapping[str, Sequence[Difference]]:
        """The differences from the reference, by measure."""
        tests = {}
        for name in dict.fromkeys((*MEASURES, self.measure)):
            judge = self._criterion(name)
            values = {
                method: {run.seed: value for run in group if (value := judge.of(run)) is not None}
                for method, group in self._groups.items()
                if name not in TO_TARGET or all(judge.of(run) is not None for run in group)
            }
            tested = differences(values, self.against, judge.metric.higher_is_better)
            tests[name] = [test for test in tested if test.seeds > 1]
        return tests

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

    def spreads(self, measure: str) -> "dict[str, Spread | None]":
        """Return one of the `MEASURES`, or a cost until the first target, by method; None for a
        method that did not reach the target with every seed.
        """
        rows = self.rows
        if measure not in TO_TARGET:
            return dict(rows["mean_of_last" if measure == "last" else measure])
        if not self.targets:
            return dict.fromkeys(rows.index)
        key = target_key(self.targets[0])
        complete = rows[f"reached_{key}"] == rows["seeds"]
        return dict(rows[f"{measure}_to_{key}"].where(complete, None))

    @cached_property
    def table(self) -> "pandas.DataFrame":
        """The comparison of the methods: per cent, bytes in decimal units, seconds; mean ± std over
        seeds.
        """
        rows = self.rows
        columns = {Column("Method", order="ascending"): [Cell(name, name) for name in rows.index]}
        for name in ("seeds", "rounds"):
            columns[Column(name.capitalize())] = _counts(rows[name])
        columns |= self._scores() | self._costs()
        for name, (title, text, order) in _MEANS.items():
            if name not in _OPTIONAL or rows[name].notna().any():
                columns[Column(title, order=order)] = [
                    Cell(text(spread.mean), spread.mean) if spread else Cell("–")
                    for spread in rows[name]
                ]
        return table_of(columns | {Column("Faults"): _counts(rows["faults"])})

    def _scores(self) -> dict[Column, list[Cell]]:
        """Return the columns of the metric, with marks."""
        best = _BEST if self.metric.higher_is_better else _SMALLEST
        measures = {
            "final": (f"Final {self.metric.noun}", best),
            "best": (f"Best {self.metric.noun}", best),
            "last": (f"Mean of last {self.averaged}", best),
        }
        if self.rows["personal"].notna().any():
            measures |= {
                "personal": ("Clients' own", best),
                "client_spread": ("Std over clients", _SMALLEST),
                "client_worst": ("Worst tenth", best),
            }
        unit = ", %" if self.metric.share else ""
        return {
            Column(title + unit, *order, score=True): self.score_cells(name)
            for name, (title, order) in measures.items()
        }

    def score_cells(self, measure: str) -> list[Cell]:
        """Return the cells of a measure with its marks, method by method."""
        metric = self.criterion.metric if measure in TO_TARGET else self.metric
        marks = self.marks.get(measure, {})
        return [
            score_cell(spread, metric, marks.get(method, ""))
            for method, spread in self.spreads(measure).items()
        ]

    def _costs(self) -> dict[Column, list[Cell]]:
        """Return the columns of the costs until each target; seconds only where they describe the
        methods, not this machine.
        """
        timed = any(map(self.timed, self.rows.index))
        return {
            Column(f"{cost.capitalize()} to {target_text(self.metric, target)}", *_SMALLEST): [
                self._cost(cost, target, method) for method in self.rows.index
            ]
            for cost in (TO_TARGET if timed else TO_TARGET[:-1])
            for target in self.targets
        }

    def _cost(self, cost: str, target: TargetValue, method: str) -> Cell:
        """Return the cost until a target; rounds with their speed-up over the first method."""
        key = target_key(target)
        columns = [f"{cost}_to_{key}", f"reached_{key}", "seeds"]
        spread, reached, seeds = self.rows.loc[method, columns]
        if spread is None:
            return Cell(NEVER if self.measured(target, method) else "–")
        mean, several, partial = spread.mean, spread.count > 1, reached < seeds
        if cost == "bytes":
            text = byte_text(mean)
        elif cost == "seconds":
            text = f"{mean:.3g}" + (f" ± {spread.std:.2g}" if several else "")
        else:
            text = f"{mean:.1f} ± {spread.std:.1f}" if several else f"{mean:.0f}"
            first, reached_first, seeds_first = self.rows[columns].iloc[0]
            if partial:
                return Cell(f"{text} ({reached} of {seeds} seeds)", mean, partial=True)
            if method != self.rows.index[0] and reached_first == seeds_first:
                text += f" ({first.mean / mean:.1f}×)"
        return Cell(text + (SOME if partial else ""), mean, partial)

    def measured(self, target: TargetValue, method: str) -> bool:
        """Return True if a run of the method recorded the figure of a target.

        Args:
            target: A value of the metric, or the limit of a figure.
            method: Name of the method.

        Returns:
            False if no record has the figure, so that the method cannot reach the target.
        """
        return self._recorded(Target.of(target, self.metric).figure, method)

    def timed(self, method: str) -> bool:
        """Return True if a method's seconds are those of a simulated clock or of real sites."""
        real = any(REAL_SITES in run.environment for run in self._groups[method])
        return real or self._recorded("simulated_seconds", method)

    def _recorded(self, figure: str, method: str) -> bool:
        return any(figure in record for run in self._groups[method] for record in run.records)

    def halves(self) -> "tuple[pandas.DataFrame, pandas.DataFrame]":
        """Split the table into accuracies and costs.

        Seeds and rounds are in a caption. Faults are left out if no run had any.

        Returns:
            Two tables with the same lines, each with the methods in its first column.
        """
        method, _, _, *others, faults = self.table
        costs = [column for column in others if not column.score]
        if self.rows["faults"].any():
            costs.append(faults)
        scores = [column for column in others if column.score]
        return self.table[[method, *scores]], self.table[[method, *costs]]

    @property
    def differences(self) -> "tuple[str, pandas.DataFrame]":
        """The title and the table of the differences in the measure, without lines where nothing
        was tested.
        """
        tests, name, metric = self.tests[self.measure], self.criterion.name, self.criterion.metric
        points = ", in points" * metric.share
        title = f"Differences from {tests[0].other} in the {name}{points}" if tests else ""
        lines = [[test.method, *difference_cells(test, metric)] for test in tests]
        columns = {
            Column(head, order=""): [Cell(line[k]) for line in lines]
            for k, head in enumerate(("Method", *DIFFERENCE_HEADS))
        }
        return title, table_of(columns)


def measure_name(measure: str, evaluations: int, metric: Metric = ACCURACY) -> str:
    """Return the name of one of the `MEASURES`: `mean accuracy of the last 10 evaluations`.

    Args:
        measure: One of the `MEASURES`.
        evaluations: Number of evaluations that the mean covers.
        metric: The metric, for its noun.

    Returns:
        The name in words, without a unit.
    """
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
    """Return one of the `MEASURES`, or of the costs `TO_TARGET`, as a criterion.

    Args:
        measure: One of `MEASURES` or `TO_TARGET`. A cost without a target counts as `last`.
        evaluations: Number of evaluations that the mean covers.
        metric: The metric of the task.
        target: The target of a cost.

    Returns:
        The criterion. For a cost, less is better.
    """
    if measure in TO_TARGET and target is not None:
        name = f"{measure} to {target_text(metric, target)}"
        return Criterion(
            name, lambda run: measured(run, measure, evaluations, target), Metric(measure, name)
        )
    name = measure_name(measure, evaluations, metric)
    return Criterion(name, lambda run: measured(run, measure, evaluations), metric)


def _counts(counts: Iterable[int]) -> list[Cell]:
    return [Cell(str(count), count) for count in counts]


def explained(sheets: Sequence[Sheet]) -> list[str]:
    """Return the meaning of the figures, in the same words on the page, on the terminal and in the
    files.
    """
    sheets = [sheet for sheet in sheets if sheet.runs]
    if not sheets:
        return []
    first = sheets[0]
    seeds = [count for sheet in sheets for count in sheet.rows["seeds"]]
    rounds = max(rounds for sheet in sheets for rounds in sheet.rows["rounds"])
    counts = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
    spread = "" if counts == "1" else f"Mean ± standard deviation over {counts} seeds. "
    texts = [
        f"{spread}{first.metric.title} on the test set: final after {rounds} rounds, best of any "
        f"evaluation (chosen on the test data), mean of the {_last(first.averaged)}."
    ]
    evaluations = max(len(accuracies(run)) for run in first.runs)
    if first.averaged < first.last and evaluations > 1:
        used = "the last one" if first.averaged == 1 else f"the last {first.averaged}"
        texts.append(f"Only {evaluations} evaluations: 'mean of last' uses {used}.")
    if any(sheet.rows["personal"].notna().any() for sheet in sheets):
        texts.append(
            f"Clients' own: {first.metric.noun} of each client's own model on its own test "
            "data, over all samples (where not "
            "evaluated, of the global model); std over clients: unweighted; worst tenth: mean "
            "over that tenth of the clients."
        )
    if first.targets:
        faster = f"; 2×: in half as many rounds as {first.rows.index[0]}" if len(seeds) > 1 else ""
        texts.append(
            "Rounds, bytes (down and up) and seconds until the first evaluation that is as "
            "good as the target; "
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
        f"Differences from the {reference} are paired by seed and tested at the 5 % level, "
        "p-values corrected by Holm's method "
        f"for {pairs}; 95 % intervals are the t-test's, uncorrected. Significant: by the exact "
        "sign-flip test and by the paired "
        f"t-test. t-test only ({T_TEST_ONLY}): with too few seeds for the exact test to reach "
        "5 %. Not significant "
        f"({NOT_SIGNIFICANT}): all others. Equal: the same figure with every seed."
    ]
    if family * smallest_exact(seeds) >= 0.05:
        text.append(
            f"With {seeds} seeds the exact test cannot reach significance: its p is at least "
            f"{smallest_exact(seeds):.2g}. "
            f"It takes {seeds_needed(family)} seeds here."
        )
    return text


def faults_in(sheet: Sheet) -> str:
    """Return how often a client was absent, failed or was refused in this setting; empty where none
    ever was.
    """
    count = sum(sheet.rows["faults"])
    times = "once" if count == 1 else f"{count:,} times"
    return f"{times} a client was absent, failed or was refused" if count else ""


def overall(sheets: Sequence[Sheet]) -> "pandas.DataFrame":
    """Return a table of one measure of every method (a line) in every setting (a column).

    From three settings on, the last column is the mean of a method's ranks, without settings in
    which some method has no value; a method that did not reach the target with every seed comes
    last.
    """
    import pandas

    methods = list(dict.fromkeys(run.algorithm for sheet in sheets for run in sheet.runs))
    columns = {Column("Method", order="ascending"): [Cell(method, method) for method in methods]}
    ranks = pandas.DataFrame(index=methods)
    for number, sheet in enumerate(sheets):
        higher = sheet.criterion.metric.higher_is_better
        cells = dict(zip(sheet.rows.index, sheet.score_cells(sheet.measure), strict=True))
        shown = [cells.get(method, Cell("–")) for method in methods]
        title = "\n".join(map(_value_text, sheet.changes.values()))
        columns[Column(title, "largest" if higher else "smallest")] = shown
        values = pandas.Series([cell.value for cell in shown], methods, dtype=float)
        if sheet.measure in TO_TARGET or values.notna().all():
            ranks[number] = values.rank(ascending=not higher, na_option="bottom")
    if len(sheets) >= RANKED:
        columns[Column("Mean rank", "smallest", "ascending")] = [
            Cell("–") if math.isnan(mean) else Cell(f"{mean:.1f}", mean)
            for mean in ranks.mean(axis=1)
        ]
    return table_of(columns)


def _value_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def caption(sheets: Sequence[Sheet]) -> str:
    """Return the caption of the table over several settings."""
    unit = ", in per cent" if sheets[0].criterion.metric.share else ""
    ranks = " Rank 1 is the best." if len(sheets) >= RANKED else ""
    return f"{sheets[0].criterion.title}{unit}, by {', '.join(keys(sheets))}.{ranks}"


def difference_cells(test: Difference, metric: Metric) -> list[str]:
    """Return a difference with its interval, both tests and the verdict as texts.

    Args:
        test: The difference of two methods.
        metric: The metric. Shares are shown in points, bytes with their unit.

    Returns:
        Texts in the order of `DIFFERENCE_HEADS`: difference, interval, corrected p of both tests,
        verdict. `–` is undefined.
    """

    def signed(value: float) -> str:
        if metric.name == "bytes":
            return f"{'+' if value >= 0 else '-'}{byte_text(abs(value))}"
        return f"{100 * value:+.2f}" if metric.share else f"{value:+.3g}"

    ends = [signed(end) for end in (test.low, test.high) if end is not None]
    return [
        signed(test.mean),
        " to ".join(ends) or "–",
        p_text(test.t_test_corrected),
        p_text(test.exact_corrected),
        test.verdict,
    ]


def p_text(p: float | None) -> str:
    """Return a p-value with two digits; a dash where it is undefined."""
    if p is None:
        return "–"
    if p < 0.001:
        return "< 0.001"
    return f"{p:.2g}" if p < 0.995 else "1"


def keys(sheets: Sequence[Sheet]) -> list[str]:
    """Return the configuration keys that the settings vary."""
    return list(dict.fromkeys(key for sheet in sheets for key in sheet.changes))


@dataclass(frozen=True)
class ReportOptions:
    """Options of a page, which it holds so that it can be written again."""

    title: str
    targets: tuple[TargetValue, ...] = ()
    command: str = ""
    last: int = LAST
    against: str = "best"
    measure: str = "last"

    @classmethod
    def of(cls, title: str, sheet: Sheet, command: str) -> "ReportOptions":
        """Return the options of a page about this setting, or about several that begin with it.

        Args:
            title: Title of the page.
            sheet: The setting, or the first of several.
            command: The command that repeats the runs; "" for none.

        Returns:
            The options, with the targets and the measure of the sheet.
        """
        targets = tuple(sheet.targets)
        return cls(title, targets, command, sheet.last, sheet.against, sheet.measure)


def options_of(path: Path) -> ReportOptions | None:
    """Return the options of the report at `path`; None where there is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    match = re.search(r'<script type="application/json" id="about">(.*?)</script>', text, re.DOTALL)
    try:
        options = json.loads(match[1]) if match else {}
        return ReportOptions(**{**options, "targets": tuple(options["targets"])})
    except (ValueError, TypeError, KeyError):
        return None  # a page of something else
