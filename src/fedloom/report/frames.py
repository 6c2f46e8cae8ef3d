"""Figures of runs for people in Python: as frames of pandas, as text, and as HTML in a notebook."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.report.layouts import templates
from fedloom.report.summary import RunSummary, best, bytes_down, bytes_up, final, personal, seconds
from fedloom.report.units import byte_text, time_text

if TYPE_CHECKING:
    import pandas


def data_frame(lines: Iterable[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return lines as a frame, tables in them as several columns."""
    import pandas

    return pandas.json_normalize(list(lines), sep="_")


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
    """Return the final figures and the costs of a run, as two lines."""
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


def texts(table: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return the texts of a table's cells by the columns' titles on one line."""
    return table.map(str).set_axis([column.line for column in table], axis=1)


def text_table(table: "pandas.DataFrame") -> str:
    """Return a table as lines of text."""
    shown = texts(table)
    lines = [list(shown), *shown.to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'>' if k else '<'}{width}}}" for k, width in enumerate(widths))
    return "\n".join(form.format(*line) for line in lines)


def html_table(table: "pandas.DataFrame", notes: Sequence[str] = ()) -> str:
    """Return a table for a notebook, the best of each column in bold, and notes below it.

    Args:
        table: A table with `Cell` values.
        notes: Lines below the table.

    Returns:
        HTML of the table and the notes.
    """
    return templates().get_template("notebook.html").render(table=table, notes=notes)
