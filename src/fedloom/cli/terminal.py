"""Tables for the terminal: a comparison, and the trials of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from fedloom.report.cells import NEVER, SOME, Cell, Column, halves, target_text
from fedloom.report.cells import Table as Plain
from fedloom.report.sheet import DIFFERENCE_HEADS, Sheet, caption, faults_in, overall

if TYPE_CHECKING:
    from fedloom.experiment.column_statistics import Statistics

WIDE = 150
"""Columns of a terminal from which on the comparison's cells are shown with all that they say."""

_METHOD = 24
"""Columns of a terminal that a method's name may take, at most, beside its accuracies in all settings."""

_SHORTEST = 8
"""Columns of a terminal that a method's name takes at least."""


def comparison_tables(sheet: Sheet, width: int, *, explained: bool = True) -> list[Table]:
    """Return the comparison of one setting, in tables that fit the width, `explained` in the caption."""
    rows = sheet.rows
    seeds, rounds = max(row.seeds for row in rows), max(row.rounds for row in rows)
    notes = [(f"mean ± std over {seeds} seeds, " if seeds > 1 else "") + f"{rounds} rounds"] if explained else []
    notes += [text for text in [faults_in(sheet)] if text]
    if width >= WIDE:
        return [_shown(sheet.table, "; ".join(notes))]
    accuracy, cost = halves(sheet.table)
    if len(rows[0].reaches) > 2:
        cost = cost.select([k for k, column in enumerate(cost.columns) if not column.title.startswith("Bytes to")])
    if explained and rows[0].reaches:
        targets = ", ".join(target_text(sheet.metric, reach.target) for reach in rows[0].reaches)
        scores = all(isinstance(reach.target, float) for reach in rows[0].reaches)
        noun = f" {sheet.metric.noun}" if scores else ""
        notes.append(
            f"{targets}: rounds to that{noun} ({NEVER} never, {SOME} not with every seed; 2×: in half as many as the "
            "first method), B: bytes until then" + (", s: seconds" if any(row.timed for row in rows) else "")
        )
    room = width - _SHORTEST - 2
    return [*_fitting(accuracy, room), *_fitting(cost, room, "; ".join(notes))]


def overall_tables(sheets: Sequence[Sheet], width: int) -> list[Table]:
    """Return one measure of every method in every setting, as many settings side by side as the terminal has room for."""
    full, brief = overall(sheets), width < WIDE
    names = min(_sizes(full, brief)[0], _METHOD)
    return _fitting(full, width - names, caption(sheets), brief=brief, wrap=True)


def _fitting(table: Plain, room: int, caption: str = "", *, brief: bool = True, wrap: bool = False) -> list[Table]:
    """Divide the table by the `room` beside the methods' names, with the caption below the bottom table."""
    tables = [table.select([0, *block]) for block in _blocks(_sizes(table, brief), room)]
    captions = [*("" for _ in tables[1:]), caption]
    return [_shown(t, text, brief=brief, wrap=wrap) for t, text in zip(tables, captions, strict=True)]


def _sizes(table: Plain, brief: bool) -> list[int]:
    """Return the columns of a terminal that each column takes."""
    texts = [
        [*_text(column, brief).splitlines(), *(_text(line[k], brief) for line in table.lines)]
        for k, column in enumerate(table.columns)
    ]
    return [max(map(len, column), default=0) + 2 for column in texts]


def _blocks(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Divide the columns of these sizes, without the first, into blocks that fit the room."""
    blocks: list[list[int]] = [[]]
    for k, size in enumerate(sizes[1:], start=1):
        if blocks[-1] and sum(sizes[j] for j in blocks[-1]) + size > room:
            blocks.append([])
        blocks[-1].append(k)
    return blocks


def difference_table(sheet: Sheet) -> Table:
    """Return the differences of the sheet's measure from the reference, with the corrected p of both tests."""
    lines = sheet.difference_lines
    table = _frame(f"minus {lines[0][1]}", sheet.difference_title)
    *figures, verdict = DIFFERENCE_HEADS
    for title in ("Diff.", *figures[1:]):
        table.add_column(title.replace(", ", ",\n"), justify="right", no_wrap=True)
    table.add_column(verdict, no_wrap=True)
    for method, _, *cells in lines:
        table.add_row(*map(Text, (method, *cells)))
    return table


def trial_table(columns: Sequence[str], lines: Sequence[Sequence[str]], best: int, caption: str) -> Table:
    """Return the trials of a search, the best in bold."""
    table = _frame(columns[0], caption)
    for title in columns[1:]:
        table.add_column(title, justify="right", overflow="fold")
    for number, line in enumerate(lines):
        table.add_row(*(Text(text, "bold" if number == best else "") for text in line))
    return table


def statistics_tables(statistics: Statistics, width: int) -> list[Table]:
    """Return the clients' statistics in tables that fit the width."""
    from fedloom.experiment.column_statistics import caption, statistics_table

    return _fitting(
        statistics_table(statistics), width - max(map(len, [*statistics.columns, " " * _SHORTEST])), caption(statistics)
    )


def _frame(title: str, caption: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, caption=caption or None, caption_justify="left"
    )
    table.add_column(title, justify="left", overflow="fold", min_width=_SHORTEST)
    return table


def _shown(table: Plain, caption: str, *, brief: bool = False, wrap: bool = False) -> Table:
    """Return a table of the report for the terminal, with `brief` titles and cells; titles may `wrap`."""
    shown = _frame(table.columns[0].title, caption)
    for column in table.columns[1:]:
        shown.add_column(Text(_text(column, brief)), justify="right", no_wrap=not wrap, overflow="fold")
    best = table.best_lines
    for number, line in enumerate(table.lines):
        shown.add_row(*(Text(_text(cell, brief), "bold" if number in best[k] else "") for k, cell in enumerate(line)))
    return shown


def _text(entry: Column | Cell, brief: bool) -> str:
    text = entry.title if isinstance(entry, Column) else entry.text
    return entry.brief if brief and entry.brief else text
