"""Paper and measurement beside each other: on the terminal and as CSV."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from fedloom.report.cells import NEVER
from fedloom.report.export import csv_text
from fedloom.reviews.papers.measure import Measured, deviations, difference
from fedloom.reviews.papers.protocols import Measure, PaperCell, Printed

PARTIAL = "PARTIAL"
HEADS = ("Method", "Paper", "Here", "Difference", "In std", "Status")


@dataclass(frozen=True)
class CellResult:
    """One cell with its measured value; `left_out` names departures from the protocol, `failed` the
    reason of a failed run.
    """

    cell: PaperCell
    result: Measured | None
    left_out: tuple[str, ...] = ()
    failed: str = ""

    @property
    def status(self) -> str:
        """The word `complete` or `PARTIAL`, or the reason why there is no value."""
        if self.failed:
            return f"failed: {self.failed}"
        if self.result is None:
            return "not run"
        # weights are counted
        return PARTIAL if self.left_out and self.cell.measure.kind != "weights" else "complete"


def to_table(title: str, lines: Sequence[CellResult], notes: Sequence[str]) -> Table:
    """Return a table for the terminal, with a block for each column of the paper.

    Args:
        title: Title of the table.
        lines: Results of the cells.
        notes: Lines below the table.

    Returns:
        The table, in the order of the cells.
    """
    caption = Text("\n".join(notes))
    table = Table(
        title=Text(title),
        caption=caption,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.title_justify = table.caption_justify = "left"
    for name in HEADS:
        figures = name not in ("Method", "Status")  # words may break, figures may not
        least = len(PARTIAL) if name == "Status" else None
        table.add_column(
            name, justify="right" if figures else "left", no_wrap=figures, min_width=least
        )
    blocks: dict[str, list[CellResult]] = {}
    for line in lines:
        blocks.setdefault(line.cell.column, []).append(line)
    for column, block in blocks.items():
        table.add_row(Text(f"{column}, {block[0].cell.measure.unit}", style="bold"))
        for line in block:
            row, *values = cells_of(line)
            table.add_row(f"  {row}", *map(Text, values))
    return table


def to_csv(exhibit: str, lines: Sequence[CellResult]) -> str:
    """Return CSV with plain numbers. `*` is a target that was never reached.

    Args:
        exhibit: Name of the table, the first column.
        lines: Results of the cells.

    Returns:
        The text. A missing number is an empty field.
    """
    return csv_text([_plain(exhibit, line) for line in lines], ["exhibit"])


def _plain(exhibit: str, line: CellResult) -> dict[str, object]:
    cell = line.cell
    result = line.result
    printed = line.cell.printed
    return {
        "exhibit": exhibit,
        "column": cell.column,
        "row": cell.row,
        "method": cell.algorithm,
        "measure": cell.measure.kind,
        "unit": cell.measure.unit,
        "paper": printed and (NEVER if printed.mean is None else printed.mean),
        "paper_std": printed and printed.std,
        "here": result and (NEVER if result.mean is None else result.mean),
        "here_std": result and result.std,
        "difference": difference(result, printed),
        "in_std": deviations(result, printed),
        **{
            name: result and getattr(result, name) for name in ("runs", "reached", "best", "rounds")
        },
        "protocol_rounds": cell.setting.rounds,
        "status": line.status,
        "left_out": "; ".join(line.left_out),
    }


def _with_sign(deviations: float) -> str:
    return f"{deviations:+,.0f}" if abs(deviations) >= 100 else f"{deviations:+.1f}"


def cells_of(line: CellResult) -> list[str]:
    """Return method, printed and measured figure, difference, the same in standard deviations, and
    status.
    """
    measure = line.cell.measure
    result = line.result
    by = difference(result, line.cell.printed)
    deviating = deviations(result, line.cell.printed)
    return [
        line.cell.row,
        printed_text(line.cell.printed, measure),
        "" if result is None else measured_text(result, measure),
        "" if by is None else f"{by:+{_digits(measure, by)}}",
        "" if deviating is None else _with_sign(deviating),
        line.status,
    ]


def printed_text(printed: Printed | None, measure: Measure) -> str:
    """Return the paper's figure as text, such as `46.12 ± 2.35`.

    Args:
        printed: The figure; None if the paper prints none.
        measure: Kind and unit of the figure.

    Returns:
        `*` for a target that was never reached, `curve` for a figure that is only drawn, `–` for
        other missing ones.
    """
    if printed is None:
        return "curve" if measure.unit == "%" else "–"
    return NEVER if printed.mean is None else _with_deviation(printed.mean, printed.std, measure)


def measured_text(result: Measured, measure: Measure) -> str:
    """Return the measured figure as text, as in `printed_text`.

    Args:
        result: The measurement.
        measure: Kind and unit of the figure.

    Returns:
        The text. If a run missed the target, it has the rounds, the runs that reached it and the
        best figure.
    """
    if result.mean is None and measure.kind == "speedup":
        return NEVER
    if result.mean is None:
        reached = f", {result.reached} of {result.runs} did" if result.reached else ""
        near = "" if result.best is None else f", best {result.best:.1f}%"
        return f"{NEVER} in {result.rounds}{reached}{near}"
    return _with_deviation(result.mean, result.std, measure)


def _with_deviation(mean: float, std: float | None, measure: Measure) -> str:
    digits = _digits(measure, mean)
    return f"{mean:{digits}}" + ("" if std is None else f" ± {std:{_digits(measure, std)}}")


def _digits(measure: Measure, value: float) -> str:
    """Return the format with the digits that the papers print of such a figure."""
    if measure.kind == "weights":
        return ",.0f"
    if measure.kind in ("rounds", "total"):
        return ".0f" if value == round(value) else ".1f"
    return ".2f" if measure.unit in ("%", "points") or abs(value) >= 0.01 else ".2g"
