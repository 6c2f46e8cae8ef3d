"""The state of reproduction of the papers' tables and figures.

It is computed from records of `fedloom paper reproduce`. A record is a JSON file with the cells of
one table or figure as one command measured them. It also holds departures from the protocol, the
versions and the machine. `reasons.toml` beside the records gives, by name or pattern, the reason
for a table or figure without reproduction.
"""

import itertools
import math
import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fedloom.report.layouts import escape_markdown
from fedloom.reviews.papers.exhibit_record import ExhibitRecord
from fedloom.reviews.papers.library import exhibits, not_run, titles
from fedloom.reviews.papers.measure import Measured, deviations
from fedloom.reviews.papers.protocols import Exhibit, Printed
from fedloom.reviews.papers.result_table import CellResult, cells_of

STATES = {
    "within": "reproduced within two standard deviations",
    "order": "order reproduced",
    "differs": "differs",
    "partial": "partial",
    "curves": "recorded, no number printed",
    "not run": "not run",
}

_HEADS = ("table or figure", "shows", "state", "cells", "within 2 std", "order", "why not more")


@dataclass(frozen=True)
class LedgerEntry:
    """A table or figure with its records."""

    exhibit: Exhibit
    records: Sequence[ExhibitRecord]
    reason: str

    @property
    def results(self) -> list[CellResult]:
        """Return the cells of all records."""
        return [line for record in self.records for line in record.results]

    @property
    def judged(self) -> list[CellResult]:
        """Return the cells with a printed number that followed the whole protocol."""
        return [line for line in self.results if line.cell.printed is not None and _complete(line)]

    @property
    def pairs(self) -> tuple[int, int]:
        """Return the number of pairs in the paper's order and of all pairs.

        A pair is two methods of a record's column with different printed numbers.
        """
        in_order = []
        for a, b in (
            pair for record in self.records for pair in itertools.combinations(record.results, 2)
        ):
            if (
                (a.cell.column, a.cell.measure) == (b.cell.column, b.cell.measure)
                and a.cell.printed
                and b.cell.printed
            ):
                printed = _value(a.cell.printed) - _value(b.cell.printed)
                if printed != 0 and not math.isnan(printed):
                    in_order.append((_value(a.result) - _value(b.result)) * printed > 0)
        return sum(in_order), len(in_order)

    @property
    def state(self) -> str:
        """Return one of `STATES`."""
        if not self.results:
            return "not run"
        if all(line.cell.printed is None for line in self.results):
            return "curves" if any(map(_complete, self.results)) else "partial"
        if not self.judged:
            return "partial"
        if all(map(_within, self.judged)):
            return "within"
        in_order, pairs = self.pairs
        return "order" if in_order == pairs > 0 else "differs"


def ledger(folder: Path) -> list[LedgerEntry]:
    """Return every table and figure with its records in `folder`, paper by paper.

    Raises as `ExhibitRecord.read`.
    """
    reasons = tomllib.loads((folder / "reasons.toml").read_text(encoding="utf-8"))
    records = [ExhibitRecord.read(path) for path in sorted(folder.glob("*.json"))]
    return [
        LedgerEntry(
            entry,
            [record for record in records if record.exhibit == name],
            next((reason for pattern, reason in reasons.items() if fnmatchcase(name, pattern)), ""),
        )
        for name, entry in exhibits().items()
    ]


def to_markdown(entries: Sequence[LedgerEntry]) -> str:
    """Return the ledger as Markdown: a table for each version of a paper, then its records."""
    blocks = []
    for version, title in titles().items():
        entries_here = [entry for entry in entries if entry.exhibit.id.startswith(f"{version}.")]
        drawings = [
            [name.partition(".")[2], escape_markdown(kind), "nothing to run", "", "", "", ""]
            for name, kind in not_run().items()
            if name.startswith(f"{version}.")
        ]
        lines = [*map(_overview, entries_here), *drawings]
        blocks += [f"## {title}\n", _table(_HEADS, lines, texts=range(len(_HEADS)))]
        for entry in (entry for entry in entries_here if entry.records):
            heading = f"### {entry.exhibit.id} {{#{entry.exhibit.id.replace('.', '-')}}}"
            blocks.append("\n".join([f"{heading}\n", *map(_details, entry.records)]))
    return "\n".join(blocks)


def _overview(entry: LedgerEntry) -> list[str]:
    name = entry.exhibit.id.partition(".")[2]
    recorded = len({(line.cell.row, line.cell.column) for line in entry.results})
    in_order, pairs = entry.pairs
    return [
        f"[{name}](#{entry.exhibit.id.replace('.', '-')})" if entry.records else name,
        escape_markdown(entry.exhibit.shows),
        STATES[entry.state],
        f"{recorded} of {len(entry.exhibit.cells)}",
        f"{sum(map(_within, entry.judged))} of {len(entry.judged)}" if entry.judged else "",
        f"{in_order} of {pairs} pairs" if pairs else "",
        entry.reason if entry.state not in ("within", "curves") else "",
    ]


def _details(record: ExhibitRecord) -> str:
    computed = record.environment
    versions = ", ".join(
        f"{name} {computed[name]}" for name in ("fedloom", "python", "torch") if name in computed
    )
    machine = (
        f"{computed.get('processor') or computed.get('machine', '')}, "
        f"{computed.get('processors', '?')} cores"
    )
    source = f"; transcribed from {record.source}" if record.source else ""
    lines = []
    for line in record.results:
        method, printed, here, _, in_std, _ = cells_of(line)
        setting, protocol = (
            f"{line.cell.column}, {line.cell.measure.unit}",
            "; ".join(line.left_out) or "followed",
        )
        lines.append(list(map(escape_markdown, (setting, method, printed, here, in_std, protocol))))
    table = _table(
        ("setting", "method", "paper", "here", "in std", "protocol"), lines, texts=(0, 1, 5)
    )
    return f"`{record.command}` ({record.date}; {versions}; {machine}{source})\n\n{table}"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], texts: Collection[int]) -> str:
    """Return a Markdown table of cells that are Markdown already; columns are right-aligned but for
    the `texts`.
    """
    rule = ["---" if k in texts else "---:" for k in range(len(heads))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, rule, *lines))


def _complete(line: CellResult) -> bool:
    """Return True if the whole protocol was followed, as far as it can change the value.

    Rounds after a target that every run reached cannot change it.
    """
    measure = line.cell.measure
    reached = (
        measure.target is not None and line.result is not None and line.result.mean is not None
    )
    return measure.kind == "weights" or all(
        reached and text.endswith(" rounds") for text in line.left_out
    )


def _within(line: CellResult) -> bool:
    """Return True if the value is at most two standard deviations from the printed one.

    Without a known deviation, the two must be equal.
    """
    by = deviations(line.result, line.cell.printed)
    return (
        math.isclose(_value(line.result), _value(line.cell.printed), rel_tol=1e-6)
        if by is None
        else abs(by) <= 2
    )


def _value(figure: Measured | Printed | None) -> float:
    """Return the figure; infinity for a target that was never reached: it is after any round."""
    return math.inf if figure is None or figure.mean is None else figure.mean
