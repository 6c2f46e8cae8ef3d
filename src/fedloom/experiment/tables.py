"""Tables for the terminal: the comparison, and what there is to choose from."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedloom.algorithm import Algorithm
from fedloom.expression import show
from fedloom.registry import Entry, Registry
from fedloom.report.summary import Row, Spread
from fedloom.report.tables import NEVER, comparison, percent

WIDE = 150
"""Columns of a terminal from which on the comparison's cells are shown with all that they say."""

SOME = "†"
"""Follows the mean of the seeds that reached a target where others did not."""

_SHORT_TITLES = {
    "Final accuracy, %": "Final %",
    "Best accuracy, %": "Best %",
    "Rounds to ": "",
    "Bytes down": "Down",
    "Bytes up": "Up",
}


def comparison_table(rows: Sequence[Row], width: int) -> Table:
    """The comparison's columns that matter at a glance, the best values bold; the report and the files have everything."""
    full = comparison(rows)
    wanted = [k for k, column in enumerate(full.columns) if _shown(column.title)]
    seeds, rounds = max(row.seeds for row in rows), max(row.rounds for row in rows)
    faults = sum(row.faults for row in rows)
    caption = (f"mean ± std over {seeds} seeds, " if seeds > 1 else "") + f"{rounds} rounds"
    if width < WIDE and rows[0].reaches:
        shares = ", ".join(f"{percent(reach.target)} %" for reach in rows[0].reaches)
        caption += f"; {shares}: rounds to that accuracy ({NEVER} never, {SOME} not with every seed)"
    caption += f"; {faults} times a client was absent, failed or was refused" if faults else ""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, caption=caption, caption_justify="left")
    for k in wanted:
        title = full.columns[k].title
        for long, short in _SHORT_TITLES.items() if width < WIDE else ():
            title = title.replace(long, short)
        table.add_column(title, justify="right" if k else "left", no_wrap=k > 0, overflow="fold")
    best = {k: full.best(k) for k in wanted}
    for position, (row, line) in enumerate(zip(rows, full.lines, strict=True)):
        short_cells = _short(row) if width < WIDE else {}
        cells = [short_cells.get(full.columns[k].title, line[k].text) for k in wanted]
        table.add_row(*(Text(c, "bold" if position in best[k] else "") for k, c in zip(wanted, cells, strict=True)))
    return table


def _shown(title: str) -> bool:
    return title not in ("Seeds", "Rounds", "Mean of last, %", "Faults") and not title.startswith("Bytes to")


def _short(row: Row) -> dict[str, str]:
    """What fits a narrow terminal of the cells that are long, by their columns' titles."""
    cells = {"Final accuracy, %": _share(row.final), "Best accuracy, %": _share(row.best)}
    for reach in row.reaches:
        mean = NEVER if reach.rounds is None else f"{reach.rounds.mean:.0f}"
        cells[f"Rounds to {percent(reach.target)} %"] = mean + (SOME if 0 < reach.reached < reach.seeds else "")
    if row.seconds is not None:
        minutes, seconds = divmod(round(row.seconds.mean), 60)
        cells["Time"] = f"{minutes}:{seconds:02d}"
    return cells


def _share(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    return f"{100 * spread.mean:.1f}" + (f"±{100 * spread.std:.1f}" if spread.count > 1 else "")


def overview(registry: Registry[Any]) -> Table:
    """Name, one line, parameters with their defaults."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("Name", style="bold", no_wrap=True)
    table.add_column("What it is", ratio=3)
    table.add_column("Parameters", ratio=2)
    for entry in registry:
        table.add_row(entry.name, Text(entry.summary), Text(", ".join(signature(entry))))
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
