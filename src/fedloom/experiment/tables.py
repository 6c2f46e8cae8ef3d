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
from fedloom.report.summary import Row
from fedloom.report.tables import comparison


def comparison_table(rows: Sequence[Row], width: int) -> Table:
    """The comparison's columns that matter at a glance; the report and the files have all. The best values are bold."""
    full = comparison(rows)
    wanted = [k for k, column in enumerate(full.columns) if _shown(column.title, rows)]
    seeds = max((row.seeds for row in rows), default=0)
    rounds = max((row.rounds for row in rows), default=0)
    caption = f"mean ± std over {seeds} seeds, {rounds} rounds" if seeds > 1 else f"{rounds} rounds"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1) if width >= 100 else (0, 0, 0, 1), caption=caption)
    for k in wanted:
        title = full.columns[k].title.replace(" accuracy, %", " %")
        table.add_column(title, justify="right" if k else "left", overflow="fold", no_wrap=False)
    best = {k: full.best(k) for k in wanted}
    for position, line in enumerate(full.lines):
        table.add_row(*(Text(line[k].text, style="bold" if position in best[k] else "") for k in wanted))
    return table


def _shown(title: str, rows: Sequence[Row]) -> bool:
    if title == "Faults":
        return any(row.faults for row in rows)
    return title not in ("Seeds", "Rounds", "Mean of last, %") and not title.startswith("Bytes to")


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
