"""Tables for the terminal: the comparison, and what there is to choose from."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedloom.algorithm import Algorithm
from fedloom.config.expression import show
from fedloom.config.registry import Entry
from fedloom.report.cells import NEVER, halves
from fedloom.report.cells import Table as Plain
from fedloom.report.sheet import Sheet, difference_cells, difference_title, faults_in, keys, overall, words
from fedloom.report.summary import LAST, Reach, Row, Spread
from fedloom.report.units import byte_text, percent

WIDE = 150
"""Columns of a terminal from which on the comparison's cells are shown with all that they say."""

SOME = "†"
"""Follows the mean of the seeds that reached a target where others did not."""

_METHOD = 24
"""Columns of a terminal that a method's name may take, at most, beside its accuracies in all settings."""

_SHORT_TITLES = {
    "Final accuracy, %": "Final %",
    "Best accuracy, %": "Best %",
    "Mean of last, %": "Last {last}, %",
    "Clients' own, %": "Clients %",
    "Std over clients, %": "Spread",
    "Worst tenth, %": "Worst %",
    "Rounds to ": "",
    "Bytes to ": "B ",
    "Bytes down": "Down",
    "Bytes up": "Up",
}


def comparison_tables(sheet: Sheet, width: int, *, explained: bool = True) -> list[Table]:
    """The comparison of one setting, the best values bold: two tables that fit a narrow terminal, accuracies and what they
    cost, or one on a wide terminal. The files have everything. Below stands how often clients failed, and, where `explained`, how
    to read it."""
    rows = sheet.rows
    seeds, rounds = max(row.seeds for row in rows), max(row.rounds for row in rows)
    told = [(f"mean ± std over {seeds} seeds, " if seeds > 1 else "") + f"{rounds} rounds"] if explained else []
    told += [text for text in [faults_in(sheet)] if text]
    if width >= WIDE:
        return [_shown(sheet.table, "; ".join(told), last=sheet.last)]
    accuracy, cost = halves(sheet.table)
    if len(rows[0].reaches) > 2:
        cost = cost.part([k for k, column in enumerate(cost.columns) if not column.title.startswith("Bytes to")])
    short = [_short(row, rows[0], sheet.marks) for row in rows]
    if explained and rows[0].reaches:
        shares = ", ".join(f"{percent(reach.target)} %" for reach in rows[0].reaches)
        told.append(
            f"{shares}: rounds to that accuracy ({NEVER} never, {SOME} not with every seed; 2×: in half as many as the first "
            "method), B: bytes until then"
        )
    return [_shown(half, text, short, sheet.last) for half, text in ((accuracy, ""), (cost, "; ".join(told)))]


def overall_tables(sheets: Sequence[Sheet], width: int) -> list[Table]:
    """One measure of every method in every setting, as many settings beside each other as the terminal has room for."""
    full = overall(sheets, digits=2 if width >= WIDE else 1)
    what = f"{words(sheets[0].measure, sheets[0].last)}, %, by {', '.join(keys(sheets))}; rank 1 is the best"
    rank = len(full.columns) - 1
    blocks = _blocks(full, width)
    return [
        _shown(
            full.part([0, *block, *([rank] if block is blocks[-1] else [])]),
            what if block is blocks[-1] else "",
            tight=True,
        )
        for block in blocks
    ]


def _blocks(full: Plain, width: int) -> list[list[int]]:
    """The settings' columns in as many blocks as the width asks for; each leaves room for the last column."""
    texts = [
        [*column.title.splitlines(), *(line[k].text.replace(" ± ", "±") for line in full.lines)]
        for k, column in enumerate(full.columns)
    ]
    sizes = [max(map(len, column), default=0) + 2 for column in texts]
    room = width - min(sizes[0], _METHOD) - sizes[-1]
    blocks: list[list[int]] = [[]]
    for k in range(1, len(sizes) - 1):
        if blocks[-1] and sum(sizes[j] for j in blocks[-1]) + sizes[k] > room:
            blocks.append([])
        blocks[-1].append(k)
    return blocks


def difference_table(sheet: Sheet) -> Table:
    """The differences of the sheet's measure from the reference, with the corrected p of both tests."""
    tests = sheet.tests[sheet.measure]
    table = _frame(f"minus {tests[0].other}", difference_title(sheet))
    for title in ("Diff.", "95 % interval", "p (t)", "p (exact)"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for found in tests:
        table.add_row(Text(found.method), *map(Text, difference_cells(found)))
    return table


def trial_table(columns: Sequence[str], lines: Sequence[Sequence[str]], best: int, caption: str) -> Table:
    """Trials of a search, the chosen one bold."""
    table = _frame(columns[0], caption)
    for title in columns[1:]:
        table.add_column(title, justify="right", overflow="fold")
    for number, line in enumerate(lines):
        table.add_row(*(Text(text, "bold" if number == best else "") for text in line))
    return table


def _frame(title: str, caption: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, caption=caption or None, caption_justify="left"
    )
    table.add_column(title, justify="left", overflow="fold")
    return table


def _shown(
    table: Plain, caption: str, short: Sequence[dict[str, str]] = (), last: int = LAST, tight: bool = False
) -> Table:
    """A table of the report for the terminal. `short` are cells, by title, in the place of long ones; with them go short
    titles. `tight` closes up around ±."""
    shown = _frame(table.columns[0].title, caption)
    best = [table.best(k) for k in range(len(table.columns))]
    for column in table.columns[1:]:
        title = column.title
        for long, brief in _SHORT_TITLES.items() if short else ():
            title = title.replace(long, brief.format(last=last))
        shown.add_column(Text(title), justify="right", no_wrap=not tight, overflow="fold")
    for number, line in enumerate(table.lines):
        brief_cells = short[number] if short else {}
        cells = [brief_cells.get(column.title, cell.text) for column, cell in zip(table.columns, line, strict=True)]
        texts = [cell.replace(" ± ", "±") if tight else cell for cell in cells]
        shown.add_row(*(Text(text, "bold" if number in best[k] else "") for k, text in enumerate(texts)))
    return shown


def _short(row: Row, first: Row, marks: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What fits a narrow terminal of the cells that are long, by their columns' titles."""
    mark = {measure: found.get(row.algorithm, "") for measure, found in marks.items()}
    cells = {
        "Final accuracy, %": _share(row.final) + mark.get("final", ""),
        "Best accuracy, %": _share(row.best) + mark.get("best", ""),
        "Mean of last, %": _share(row.last) + mark.get("last", ""),
        "Clients' own, %": _share(row.personal) + mark.get("personal", ""),
        "Std over clients, %": _share(row.client_std),
        "Worst tenth, %": _share(row.client_worst),
    }
    for reach, base in zip(row.reaches, first.reaches, strict=True):
        cells[f"Rounds to {percent(reach.target)} %"] = _rounds(reach, base)
    for reach in row.reaches:
        some = SOME if 0 < reach.reached < reach.seeds else ""
        if reach.bytes is not None:
            cells[f"Bytes to {percent(reach.target)} %"] = byte_text(reach.bytes.mean) + some
    if row.seconds is not None:
        minutes, seconds = divmod(round(row.seconds.mean), 60)
        cells["Time"] = f"{minutes}:{seconds:02d}"
    return cells


def _rounds(reach: Reach, first: Reach) -> str:
    """Mean rounds to a target, with the speed-up over the first method where every seed of both reached it."""
    if reach.rounds is None:
        return NEVER
    text = f"{reach.rounds.mean:.0f}"
    if reach.reached < reach.seeds:
        return text + SOME
    whole = reach is not first and first.rounds is not None and first.reached == first.seeds
    return f"{text} {first.rounds.mean / reach.rounds.mean:.1f}×" if whole and first.rounds else text


def _share(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    return f"{100 * spread.mean:.1f}" + (f"±{100 * spread.std:.1f}" if spread.count > 1 else "")


def overview(entries: Iterable[Entry[Any]]) -> Table:
    """Name, one line, parameters with their defaults."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("Name", style="bold", no_wrap=True)
    table.add_column("What it is", ratio=3)
    table.add_column("Parameters", ratio=2)
    for entry in entries:
        table.add_row(entry.name, Text(entry.summary), Text(", ".join(signature(entry))))
    return table


def family_table(title: str, entries: Iterable[Entry[Any]]) -> Table:
    """A family of methods: name and one line of each."""
    table = Table(
        box=None, show_header=False, padding=(0, 0, 0, 2), title=Text(f"\n{title}", "bold"), title_justify="left"
    )
    table.add_column(style="bold", no_wrap=True, width=10)
    table.add_column()
    for entry in entries:
        table.add_row(entry.name, Text(entry.summary))
    return table


def signature(entry: Entry[Any]) -> list[str]:
    """Each parameter with its default, as a configuration writes it."""
    if inspect.isclass(entry.make) and issubclass(entry.make, Algorithm) and entry.make.variadic:
        return ["method:last round, ..., method"]
    return [_parameter(name, parameter) for name, parameter in entry.parameters.items()]


def _parameter(name: str, parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return name
    if repr(parameter.default) == "<factory>":
        return f"{name}=..."
    text = parameter.default
    return f"{name}={text if isinstance(text, str) and text.isidentifier() else show(text)}"


def description(entry: Entry[Any]) -> str:
    """How it is written, then everything its docstring says."""
    inside = ", ".join(signature(entry))
    return f"{entry.name}({inside})\n\n{inspect.getdoc(entry.make) or ''}"
