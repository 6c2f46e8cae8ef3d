"""Tables for the terminal: a comparison, and the trials of a search."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.report.cells import best_cells
from fedloom.report.method_settings import settings_table, tuning_notes
from fedloom.report.sheet import Sheet, caption, explained, faults_in, overall, reading
from fedloom.survey import column_statistics

if TYPE_CHECKING:
    import pandas

_SHORTEST = 8
_LONGEST = 24
"""Terminal columns for a method's name: at least, and at most beside its accuracies."""


def print_tables(sheets: Sequence[Sheet]) -> None:
    """Print each setting, then all in one table, and the reading of their tests."""
    console = Console(highlight=False)
    for sheet in sheets:
        if sheet.setting:
            console.print(Text(f"\n{sheet.setting}", "bold"), soft_wrap=True)
        for table in comparison_tables(sheet, console.width):
            console.print(table)
        if text := faults_in(sheet):
            console.print(text)
        if (settings := settings_table(sheet)) is not None:
            console.print(Text("settings of each method"))
            for table in _fitting(settings, console.width - _SHORTEST - 2):
                console.print(table)
    if len(sheets) > 1:
        console.print(Text("\nall settings", "bold"))
        for table in overall_tables(sheets, console.width):
            console.print(table)
    elif sheets and sheets[0].tests[sheets[0].measure]:
        console.print(*difference_tables(sheets[0], console.width), sep="\n")
    for text in (*explained(sheets), *tuning_notes(sheets), *reading(sheets)):
        console.print(Text(text))


def comparison_tables(sheet: Sheet, width: int) -> list[Table]:
    """Return the comparison of one setting, in tables that fit into `width` terminal columns.

    Args:
        sheet: The comparison.
        width: Columns of the terminal. Further columns of a table go to further tables.

    Returns:
        One or more tables for each table of the sheet. Each has a line per method.
    """
    room = width - _SHORTEST - 2
    return [table for half in sheet.halves() for table in _fitting(half, room)]


def overall_tables(sheets: Sequence[Sheet], width: int) -> list[Table]:
    """Return one measure of every method in every setting.

    Args:
        sheets: The comparison of each setting.
        width: Columns of the terminal; further settings go to further tables.

    Returns:
        Tables with a line per method and a column per setting. The last has the caption.
    """
    table = overall(sheets)
    return _fitting(table, width - min(_sizes(table)[0], _LONGEST), caption(sheets))


def _fitting(table: "pandas.DataFrame", room: int, caption: str = "") -> list[Table]:
    """Divide a table into tables that fit into `room`, the columns beside the methods' names.

    The last table has the caption.
    """
    sizes = _sizes(table)
    blocks = [[0]]
    for k, size in enumerate(sizes[1:], start=1):
        if len(blocks[-1]) > 1 and sum(sizes[j] for j in blocks[-1][1:]) + size > room:
            blocks.append([0])
        blocks[-1].append(k)
    return [
        shown_table(table.iloc[:, block], caption if block is blocks[-1] else "")
        for block in blocks
    ]


def _sizes(table: "pandas.DataFrame") -> list[int]:
    """Return the terminal columns of each table column, with its title on several lines."""
    return [
        max(map(len, [*column.title.split(), *map(str, cells)])) + 2
        for column, cells in table.items()
    ]


def difference_tables(sheet: Sheet, width: int) -> list[Table]:
    """Return the differences from the reference, with the corrected p of both tests.

    Args:
        sheet: The comparison of one setting.
        width: Columns of the terminal; further measures go to further tables.

    Returns:
        Tables with a line per method. The last has the title of the tests as its caption.
    """
    title, table = sheet.differences
    return _fitting(table, width - _SHORTEST - 2, title)


def statistics_tables(statistics: column_statistics.Statistics, width: int) -> list[Table]:
    """Return the clients' statistics in tables that fit the width.

    Args:
        statistics: Statistics of all clients.
        width: Columns of the terminal; further statistics go to further tables.

    Returns:
        Tables with a line per column of the data. The last has the caption.
    """
    room = width - max(_SHORTEST, *map(len, statistics.columns))
    return _fitting(
        column_statistics.statistics_table(statistics), room, column_statistics.caption(statistics)
    )


def _frame(title: str, caption: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, caption_justify="left")
    table.caption = caption or None
    table.add_column(title, justify="left", overflow="fold", min_width=_SHORTEST)
    return table


def shown_table(table: "pandas.DataFrame", caption: str = "") -> Table:
    """Return a table of the report for the terminal; its titles may wrap, its cells do not.

    Args:
        table: The table, with `Cell` values and `Column` titles. Its first column names the lines.
        caption: A line below the table; by default none.

    Returns:
        The table, with its best values in bold.
    """
    shown = _frame(table.columns[0].title, caption)
    for column, size in zip(table.columns[1:], _sizes(table)[1:], strict=True):
        shown.add_column(Text(column.title), justify="right", width=size - 2)
    best = best_cells(table)
    for cells, bold in zip(table.to_numpy(), best.to_numpy(), strict=True):
        shown.add_row(
            *(Text(cell.text, "bold" if k else "") for cell, k in zip(cells, bold, strict=True))
        )
    return shown
