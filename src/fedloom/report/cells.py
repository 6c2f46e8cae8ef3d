"""The comparison as a table of cells: the text to show and the number to sort by. Terminal, page and files show these tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedloom.objectives import ACCURACY, Metric
from fedloom.report.summary import LAST, Reach, Row, Spread, Target, TargetValue
from fedloom.report.units import byte_text, percent, time_text

NEVER = "*"
"""Stands where a target was never reached."""

SOME = "†"
"""Follows, in brief, the mean of the seeds that reached a target where others did not."""


@dataclass(frozen=True)
class Cell:
    """What is shown, and what to sort by (None sorts last); `partial` when some seeds are missing from the value, `brief` what a
    narrow terminal shows where that is shorter."""

    text: str
    value: float | str | None
    partial: bool = False
    brief: str = ""


@dataclass(frozen=True)
class Column:
    """A column's title, whether the `largest`, the `smallest` or no (`""`) value is the best, how a page sorts by it at first,
    `ascending`, `descending` or never (`""`), and a `brief` title where there is one."""

    title: str
    best: str = ""
    order: str = "descending"
    brief: str = ""
    score: bool = False  # whether its values are of the metric that methods are judged by


@dataclass(frozen=True)
class Table:
    """Columns and, in the order of the methods, one line of cells each."""

    columns: tuple[Column, ...]
    lines: tuple[tuple[Cell, ...], ...]

    def part(self, kept: Sequence[int]) -> Table:
        """The table of these columns alone."""
        return Table(
            tuple(self.columns[k] for k in kept), tuple(tuple(line[k] for k in kept) for line in self.lines)
        )  # fmt: skip

    @property
    def best_lines(self) -> list[set[int]]:
        """For each column the lines with the best value."""
        return [self.best(k) for k in range(len(self.columns))]

    def best(self, column: int) -> set[int]:
        """The lines with the best value of a column: none unless there are two different values to compare. A value that
        leaves out the seeds that failed is not compared, and values that look the same share the mark."""
        values = {k: line[column].value for k, line in enumerate(self.lines) if not line[column].partial}
        numbers = {k: float(f"{value:.4g}") for k, value in values.items() if isinstance(value, int | float)}
        wanted = self.columns[column].best
        if not wanted or len(set(numbers.values())) < 2:
            return set()
        best = max(numbers.values()) if wanted == "largest" else min(numbers.values())
        return {k for k, value in numbers.items() if value == best}


def comparison(rows: Sequence[Row], marks: Mapping[str, Mapping[str, str]] | None = None, last: int = LAST) -> Table:
    """Rows of `summarise` as a table for people: per cent, bytes in decimal units, seconds; mean ± std over seeds.

    The rounds to a target carry their speed-up over the first method, `1.8×`, where every seed of both reached it, and
    how many seeds did where not all. Columns about the clients' own test data stand there where there are such figures.
    `marks` are put behind the accuracies, by measure (`MEASURES`) and method; `last` evaluations are in the mean of the last.
    """
    metric = rows[0].metric if rows else ACCURACY
    targets = [target_text(metric, reach.target) for reach in rows[0].reaches] if rows else []
    clients = any(row.personal is not None for row in rows)
    private = any(row.epsilon is not None for row in rows)
    clocked, timed = any(row.simulated is not None for row in rows), any(row.timed for row in rows)
    in_percent = ", %" if metric.share else ""
    best = ("largest", "descending") if metric.higher_is_better else ("smallest", "ascending")
    columns = (
        Column("Method", order="ascending"),
        Column("Seeds"),
        Column("Rounds"),
        Column(f"Final {metric.noun}{in_percent}", *best, f"Final{metric.unit}", score=True),
        Column(f"Best {metric.noun}{in_percent}", *best, f"Best{metric.unit}", score=True),
        Column(f"Mean of last{in_percent}", *best, f"Last {last}{in_percent}", score=True),
        *(
            (
                Column(f"Clients' own{in_percent}", *best, f"Clients{metric.unit}", score=True),
                Column(f"Std over clients{in_percent}", "smallest", "ascending", "Spread", score=True),
                Column(f"Worst tenth{in_percent}", *best, f"Worst{metric.unit}", score=True),
            )
            if clients
            else ()
        ),
        *(Column(f"Rounds to {target}", "smallest", "ascending", target) for target in targets),
        *(Column(f"Bytes to {target}", "smallest", "ascending", f"B {target}") for target in targets),
        *(Column(f"Seconds to {target}", "smallest", "ascending", f"s {target}") for target in targets if timed),
        *((Column("Epsilon", order="ascending"),) if private else ()),
        *((Column("Simulated time", brief="Sim. time"),) if clocked else ()),
        Column("Bytes down", brief="Down"),
        Column("Bytes up", brief="Up"),
        Column("Time"),
        Column("Faults"),
    )
    return Table(columns, tuple(_line(row, rows[0], clients, private, clocked, timed, marks or {}) for row in rows))


def halves(table: Table) -> tuple[Table, Table]:
    """A comparison as two tables that fit a page: accuracies, and what they cost. Seeds and rounds, which a caption says, are
    left out, and so are faults of none."""
    titles = [column.title for column in table.columns]
    accuracy = [k for k, column in enumerate(table.columns) if column.score]
    faultless = all(line[titles.index("Faults")].text == "0" for line in table.lines)
    silent = {"Method", "Seeds", "Rounds", *(["Faults"] if faultless else [])}
    cost = [k for k, title in enumerate(titles) if k not in accuracy and title not in silent]
    return table.part([0, *accuracy]), table.part([0, *cost])


def score_cell(spread: Spread | None, metric: Metric, mark: str = "") -> Cell:
    """A metric over seeds, a share in per cent: `87.21 ± 0.48`, or in brief `87.2±0.5`, with a mark behind it."""
    if spread is None:
        return Cell("–", None)
    several, mean, std = spread.count > 1, spread.mean, spread.std
    if metric.name == "bytes":
        return Cell(byte_text(mean) + (f" ± {byte_text(std)}" if several else "") + mark, mean)
    if metric.share:
        mean, std, places = 100 * mean, 100 * std, (2, 1)
    else:  # in brief about three digits of the mean, else two of the deviation too
        size = math.floor(math.log10(abs(mean))) if mean else 0
        few = max(0, 2 - size) if size >= 0 else 1 - size
        places = (max(few, 1 - math.floor(math.log10(std))) if several and std > 0 else few + 1, few)
    text, brief = (f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if several else "") for digits in places)
    return Cell(f"{text}{mark}", spread.mean, brief=f"{brief.replace(' ± ', '±')}{mark}")


def target_text(metric: Metric, target: TargetValue) -> str:
    """A target as people read it: `87.5 %`, `loss ≤ 0.2`."""
    wanted = Target.of(target, metric)
    share = metric.share and wanted.figure == metric.name
    value = f"{percent(wanted.value)} %" if share else f"{wanted.value:g}"
    return f"{wanted.figure} {'≥' if wanted.upwards else '≤'} {value}" if isinstance(target, str) else value


def _line(
    row: Row,
    first: Row,
    clients: bool,
    private: bool,
    clocked: bool,
    timed: bool,
    marks: Mapping[str, Mapping[str, str]],
) -> tuple[Cell, ...]:
    shares = {"final": row.final, "best": row.best, "last": row.last, **({"personal": row.personal} if clients else {})}
    return (
        Cell(row.algorithm, row.algorithm),
        Cell(str(row.seeds), row.seeds),
        Cell(str(row.rounds), row.rounds),
        *(
            score_cell(spread, row.metric, marks.get(name, {}).get(row.algorithm, ""))
            for name, spread in shares.items()
        ),
        *(score_cell(spread, row.metric) for spread in ((row.client_std, row.client_worst) if clients else ())),
        *(_rounds(reach, base) for reach, base in zip(row.reaches, first.reaches, strict=True)),
        *(_bytes(reach.bytes, NEVER if reach.measured else "–", reach.reached < reach.seeds) for reach in row.reaches),
        *(_seconds_to(reach) for reach in row.reaches if timed),
        *((_epsilon(row.epsilon),) if private else ()),
        *((_time(row.simulated),) if clocked else ()),
        _bytes(row.bytes_down),
        _bytes(row.bytes_up),
        _time(row.seconds),
        Cell(str(row.faults), row.faults),
    )


def _rounds(reach: Reach, first: Reach) -> Cell:
    if reach.rounds is None:
        return Cell(NEVER if reach.measured else "–", None)
    mean, brief = reach.rounds.mean, f"{reach.rounds.mean:.0f}"
    text = brief if reach.rounds.count == 1 else f"{mean:.1f} ± {reach.rounds.std:.1f}"
    if reach.reached < reach.seeds:
        return Cell(f"{text} ({reach.reached} of {reach.seeds} seeds)", mean, partial=True, brief=brief + SOME)
    if reach is not first and first.rounds is not None and first.reached == first.seeds:
        faster = f"{first.rounds.mean / mean:.1f}×"
        return Cell(f"{text} ({faster})", mean, brief=f"{brief} {faster}")
    return Cell(text, mean, brief=brief)


def _bytes(spread: Spread | None, missing: str = "–", partial: bool = False) -> Cell:
    if spread is None:
        return Cell(missing, None)
    text = byte_text(spread.mean)
    return Cell(text, spread.mean, partial, text + SOME if partial else "")


def _seconds_to(reach: Reach) -> Cell:
    if reach.seconds is None:
        return Cell(NEVER if reach.measured else "–", None)
    partial = reach.reached < reach.seeds
    mean, std = f"{reach.seconds.mean:.3g}", f"{reach.seconds.std:.2g}"
    text = mean if reach.seconds.count == 1 else f"{mean} ± {std}"
    return Cell(text + SOME if partial else text, reach.seconds.mean, partial, mean + SOME if partial else mean)


def _epsilon(spread: Spread | None) -> Cell:
    return Cell("–", None) if spread is None else Cell(f"{spread.mean:.3g}", spread.mean)


def _time(seconds: Spread | None) -> Cell:
    if seconds is None:
        return Cell("–", None)
    whole = round(seconds.mean)
    return Cell(time_text(seconds.mean), seconds.mean, brief=f"{whole // 60}:{whole % 60:02d}")
