"""Figures of runs for people in Python: as frames of pandas, as text, and as HTML in a notebook."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import escape

from fedloom.errors import import_extra
from fedloom.report.cells import Table
from fedloom.report.summary import RunSummary, best, bytes_down, bytes_up, final, personal, seconds
from fedloom.report.units import byte_text, time_text

if TYPE_CHECKING:
    import pandas


def data_frame(lines: Iterable[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return lines as a frame, tables in them as several columns. Raises `MissingExtra` without
    pandas.
    """
    library = import_extra("pandas", "notebook", "a frame")
    frame: pandas.DataFrame = library.json_normalize(list(lines), sep="_")
    return frame


def plain_records(run: RunSummary) -> list[dict[str, Any]]:
    """Return the figures and seconds of each round; the clients and the faults are counted."""
    times = {timing["round"]: timing["seconds"] for timing in run.timings}
    return [
        {
            **{
                name: len(value) if isinstance(value, list) else value
                for name, value in record.items()
            },
            "seconds": times.get(record["round"]),
        }
        for record in run.records
    ]


def result_lines(run: RunSummary) -> list[str]:
    """Return the figures at the end of a run, and what it cost, as two lines."""
    metric = run.metric
    scores = {f"test {metric.noun}": final(run), "best": best(run), "clients' own": personal(run)}
    texts = [
        f"{title} {metric.text(value)}{metric.unit}"
        for title, value in scores.items()
        if value is not None
    ]
    sent = f"{byte_text(bytes_down(run))} down, {byte_text(bytes_up(run))} up"
    return [
        ", ".join(texts) or "no test samples",
        f"{len(run.records)} rounds, {sent}, {time_text(seconds(run) or 0)}",
    ]


def text_table(table: Table) -> str:
    """Return a table as lines of text."""
    heads = [" ".join(column.title.splitlines()) for column in table.columns]
    lines = [heads, *([cell.text for cell in line] for line in table.lines)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'>' if k else '<'}{width}}}" for k, width in enumerate(widths))
    return "\n".join(form.format(*line) for line in lines)


def html_table(table: Table, notes: Sequence[str] = ()) -> str:
    """Return a table for a notebook, the best of each column in bold, and notes below it."""
    best = table.best_lines
    heads = "".join(f"<th>{escape(column.title)}</th>" for column in table.columns)
    cells = [[f"<b>{escape(c.text)}</b>" if row in best[k] else escape(c.text) for k, c in enumerate(line)]
             for row, line in enumerate(table.lines)]  # fmt: skip
    body = "".join(f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in cells)
    return f"<table><tr>{heads}</tr>{body}</table>" + "".join(
        f"<p><small>{escape(note)}</small></p>" for note in notes
    )
