"""How far the papers' tables and figures are reproduced, from records of what `fedloom reproduce` measured.

A record, a JSON file, holds the cells of one table or figure as one command measured them, what of the paper's protocol was left
out, the versions and the machine. `reasons.toml` beside the records says, by name or pattern, why a table or figure was not
reproduced.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedloom.errors import InvalidValue
from fedloom.experiment.directory import to_json
from fedloom.papers.measure import Measured, deviations
from fedloom.papers.paper_file import exhibit, exhibits, papers, titles
from fedloom.papers.protocols import Exhibit
from fedloom.papers.result_table import CellResult, found_text, printed_text
from fedloom.report.export import escape_markdown, markdown_table

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
class ExhibitRecord:
    """The cells of a table or figure that one command measured; `source` names the page that they were transcribed from, if
    they were."""

    exhibit: str
    command: str
    date: str
    environment: Mapping[str, Any]
    results: tuple[CellResult, ...]
    source: str = ""

    def to_json(self) -> str:
        """The contents of the record's file. Folders of this machine are left out of the command."""
        cells = [
            {
                "row": one.cell.row,
                "column": one.cell.column,
                **{name: value for name, value in dataclasses.asdict(one.here).items() if value is not None},
                "left_out": one.left_out,
            }
            for one in self.results
            if one.here is not None
        ]
        words = shlex.split(self.command)
        folders = ("--data", "--directory")
        anywhere = [
            re.sub(r"^(\w+=)?.*", r"\1FOLDER", word) if before in folders else word
            for before, word in zip(("", *words), words, strict=False)
        ]
        told = {name: value for name, value in vars(self).items() if name != "results"}
        return to_json({**told, "command": shlex.join(anywhere), "cells": cells})

    @classmethod
    def read(cls, path: Path) -> ExhibitRecord:
        """The record in a file. Raises `InvalidValue` for another file, or for a cell that the table or figure does not have."""
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            known = {(cell.row, cell.column): cell for cell in exhibit(table["exhibit"]).cells}
            results = []
            for one in table.pop("cells"):
                row, column, left_out = one.pop("row"), one.pop("column"), tuple(one.pop("left_out"))
                if (row, column) not in known:
                    raise InvalidValue(f"{path}: {table['exhibit']} has no cell of {row!r} in {column!r}")
                here = Measured(**{"mean": None, "std": None, **one})
                results.append(CellResult(known[row, column], here, left_out))
            return cls(**table, results=tuple(results))
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, InvalidValue):
                raise
            raise InvalidValue(f"{path} is no record of a table or figure ({error})") from None


def today() -> str:
    """The date of a record that is written now."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


@dataclass(frozen=True)
class LedgerEntry:
    """A table or figure with its records."""

    exhibit: Exhibit
    records: Sequence[ExhibitRecord]
    reason: str

    @property
    def results(self) -> list[CellResult]:
        """The cells of all records."""
        return [one for record in self.records for one in record.results]

    @property
    def judged(self) -> list[CellResult]:
        """Those that followed the whole protocol, and of which the paper prints a number."""
        return [one for one in self.results if one.cell.printed is not None and _complete(one)]

    @property
    def pairs(self) -> tuple[int, int]:
        """Of the pairs of methods in one column of one record that the paper prints different numbers of, how many come out in
        the paper's order, and how many there are."""
        same = total = 0
        for record in self.records:
            for one, other in itertools.combinations(record.results, 2):
                a, b = one.cell, other.cell
                alike = (a.column, a.measure) == (b.column, b.measure)
                if alike and a.printed and b.printed and one.here and other.here:
                    printed = _beyond(a.printed.mean) - _beyond(b.printed.mean)
                    if printed != 0 and not math.isnan(printed):
                        total += 1
                        same += (_beyond(one.here.mean) - _beyond(other.here.mean)) * printed > 0
        return same, total

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if not self.results:
            return "not run"
        if all(one.cell.printed is None for one in self.results):
            return "curves" if any(map(_complete, self.results)) else "partial"
        if not self.judged:
            return "partial"
        if all(map(_within, self.judged)):
            return "within"
        same, total = self.pairs
        return "order" if same == total > 0 else "differs"


def ledger(folder: Path) -> list[LedgerEntry]:
    """Every table and figure with its records in `folder`, paper by paper. Raises as `ExhibitRecord.read`."""
    reasons = tomllib.loads((folder / "reasons.toml").read_text(encoding="utf-8"))
    records = [ExhibitRecord.read(path) for path in sorted(folder.glob("*.json"))]
    return [
        LedgerEntry(
            one,
            [record for record in records if record.exhibit == name],
            next((reason for pattern, reason in reasons.items() if fnmatchcase(name, pattern)), ""),
        )
        for name, one in exhibits().items()
    ]


def to_markdown(entries: Sequence[LedgerEntry]) -> str:
    """The ledger as Markdown: a table for each version of a paper, and below it each record."""
    parts = []
    for version, title in titles().items():
        own = [one for one in entries if one.exhibit.id.partition(".")[0] == version]
        nothing = [
            [name.partition(".")[2], escape_markdown(what), "nothing to run", "", "", "", ""]
            for one in papers()
            for name, what in one.not_run.items()
            if name.partition(".")[0] == version
        ]
        lines = [*map(_overview, own), *nothing]
        parts += [f"## {title}\n", markdown_table(_HEADS, lines, left=range(len(_HEADS)))]
        parts += [
            f"### {one.exhibit.id} {{#{_anchor(one)}}}\n\n" + "\n".join(map(_details, one.records))
            for one in own
            if one.records
        ]
    return "\n".join(parts)


def _overview(entry: LedgerEntry) -> list[str]:
    name = entry.exhibit.id.partition(".")[2]
    recorded = len({(one.cell.row, one.cell.column) for one in entry.results})
    same, pairs = entry.pairs
    return [
        f"[{name}](#{_anchor(entry)})" if entry.records else name,
        escape_markdown(entry.exhibit.shows),
        STATES[entry.state],
        f"{recorded} of {len(entry.exhibit.cells)}",
        f"{sum(map(_within, entry.judged))} of {len(entry.judged)}" if entry.judged else "",
        f"{same} of {pairs} pairs" if pairs else "",
        entry.reason if entry.state in ("differs", "partial", "not run", "order") else "",
    ]


def _details(record: ExhibitRecord) -> str:
    """The command with versions and machine, and each cell beside the print."""
    known = record.environment
    versions = ", ".join(f"{name} {known[name]}" for name in ("fedloom", "python", "torch") if name in known)
    machine = f"{known.get('processor') or known.get('machine', '')}, {known.get('processors', '?')} cores"
    source = f"; transcribed from {record.source}" if record.source else ""
    lines = []
    for one in record.results:
        cell, here = one.cell, one.here
        by = deviations(here, cell.printed)
        values = (
            f"{cell.column}, {cell.measure.unit}",
            cell.row,
            printed_text(cell.printed, cell.measure),
            "" if here is None else found_text(here, cell.measure),
            "" if by is None else f"{by:+.1f}",
            "; ".join(one.left_out) or "followed",
        )
        lines.append(list(map(escape_markdown, values)))
    table = markdown_table(("setting", "method", "paper", "here", "in std", "protocol"), lines, left=(0, 1, 5))
    return f"`{record.command}` ({record.date}; {versions}; {machine}{source})\n\n{table}"


def _complete(one: CellResult) -> bool:
    """Whether the whole protocol was followed, as far as it can change the value: rounds after a target that every run reached
    cannot."""
    reached = one.cell.measure.kind in ("rounds", "speedup") and one.here is not None and one.here.mean is not None
    return one.cell.measure.kind == "weights" or all(reached and text.endswith(" rounds") for text in one.left_out)


def _within(one: CellResult) -> bool:
    """Whether the value is at most two standard deviations from what is printed, or the same where no deviation is known."""
    by = deviations(one.here, one.cell.printed)
    if by is not None:
        return abs(by) <= 2
    assert one.here is not None
    assert one.cell.printed is not None
    return math.isclose(_beyond(one.here.mean), _beyond(one.cell.printed.mean), rel_tol=1e-6)


def _beyond(value: float | None) -> float:
    """A target that was never reached is later than any round."""
    return math.inf if value is None else value


def _anchor(entry: LedgerEntry) -> str:
    return entry.exhibit.id.replace(".", "-")
