"""Paper and measurement beside each other: on the terminal, as CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from fedloom.papers.measure import Measured, deviations, difference
from fedloom.papers.protocols import Measure, PaperCell, Printed
from fedloom.report.cells import NEVER
from fedloom.report.export import csv_text, escape_latex, latex_file, latex_table, markdown_table

PARTIAL = "PARTIAL"
NOT_RUN = "not run"
COMPLETE = "complete"

HEADS = ("Method", "Paper", "Here", "Difference", "In std", "Status")
LEFT = (0, 5)
"""The columns of text."""


@dataclass(frozen=True)
class CellResult:
    """One cell with what was found; `left_out` is what of the protocol was left out, `failed` why a run failed."""

    cell: PaperCell
    here: Measured | None
    left_out: tuple[str, ...] = ()
    failed: str = ""

    @property
    def status(self) -> str:
        """`complete`, `PARTIAL` (never without the word), or why there is nothing."""
        if self.failed:
            return f"failed: {self.failed}"
        if self.cell.measure.kind == "weights":
            return COMPLETE  # counted, not run
        if self.here is None:
            return NOT_RUN
        return PARTIAL if self.left_out else COMPLETE


def to_table(title: str, lines: Sequence[CellResult], notes: Sequence[str]) -> Table:
    """For the terminal, a block a column of the paper; `notes` stand below."""
    table = Table(
        title=Text(title),
        caption=Text("\n".join(notes)),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for name in HEADS:
        right = name not in ("Method", "Status")  # words may break, figures may not
        least = len(PARTIAL) if name == "Status" else None
        table.add_column(name, justify="right" if right else "left", no_wrap=right, min_width=least)
    for column, block in _by_column(lines).items():
        table.add_row(Text(f"{column}, {block[0].cell.measure.unit}", style="bold"))
        for line in block:
            table.add_row(f"  {line.cell.row}", *map(Text, _cells(line)))
    return table


def to_markdown(title: str, lines: Sequence[CellResult], notes: Sequence[str]) -> str:
    """As a Markdown table, the notes below."""
    rows = ([cell.replace("|", "/") for cell in (line.cell.column, line.cell.row, *_cells(line))] for line in lines)
    listed = "".join(f"- {note}\n" for note in notes)
    return f"## {title}\n\n{markdown_table(('Setting', *HEADS), rows, left=(0, 1, 6))}\n{listed}"


def to_latex(exhibit: str, title: str, lines: Sequence[CellResult], notes: Sequence[str]) -> str:
    """As LaTeX tables, one a column of the paper; the notes are in the first."""
    tables: list[str] = []
    for number, (column, block) in enumerate(_by_column(lines).items(), start=1):
        rows = ([escape_latex(cell) for cell in (line.cell.row, *_cells(line))] for line in block)
        caption, note = f"{title}, {column}, {block[0].cell.measure.unit}.", "" if tables else "; ".join(notes)
        tables.append(latex_table(HEADS, rows, caption, f"{exhibit}-{number}", note, LEFT))
    return latex_file(tables)


def _by_column(lines: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """The cells of each column of the paper."""
    found: dict[str, list[CellResult]] = {}
    for line in lines:
        found.setdefault(line.cell.column, []).append(line)
    return found


def to_csv(exhibit: str, lines: Sequence[CellResult]) -> str:
    """With plain numbers; empty where there is none. `*` is a target that was never reached."""
    return csv_text([_plain(exhibit, line) for line in lines], ["exhibit"])


def _plain(exhibit: str, line: CellResult) -> Mapping[str, object]:
    cell, here, paper = line.cell, line.here, line.cell.printed
    never = cell.measure.kind in ("rounds", "speedup")
    return {
        "exhibit": exhibit,
        "column": cell.column,
        "row": cell.row,
        "algorithm": cell.algorithm,
        "measure": cell.measure.kind,
        "unit": cell.measure.unit,
        "paper": None if paper is None else NEVER if paper.mean is None else paper.mean,
        "paper_std": None if paper is None else paper.std,
        "here": None if here is None else NEVER if here.mean is None and never else here.mean,
        "here_std": None if here is None else here.std,
        "difference": difference(here, paper),
        "in_std": deviations(here, paper),
        **{name: None if here is None else getattr(here, name) for name in ("runs", "reached", "best", "rounds")},
        "protocol_rounds": cell.setting.rounds,
        "status": line.status,
        "left_out": "; ".join(line.left_out),
    }


def _cells(line: CellResult) -> list[str]:
    """Paper, here, difference, in standard deviations, status."""
    measure, here = line.cell.measure, line.here
    by, deviating = difference(here, line.cell.printed), deviations(here, line.cell.printed)
    return [
        printed_text(line.cell.printed, measure),
        "" if here is None else found_text(here, measure),
        "" if by is None else f"{by:+{_digits(measure, by)}}",
        "" if deviating is None else f"{deviating:+,.0f}" if abs(deviating) >= 100 else f"{deviating:+.1f}",
        line.status,
    ]


def printed_text(paper: Printed | None, measure: Measure) -> str:
    """`46.12 ± 2.35`, `*` for a target that was never reached, `curve` where the paper prints no number."""
    if paper is None:
        return "curve" if measure.kind in ("best", "end", "personal") else "–"
    if paper.mean is None:
        return NEVER
    return _with_deviation(paper.mean, paper.std, measure)


def found_text(here: Measured, measure: Measure) -> str:
    """As `printed_text`; where not every run reached a target, within how many rounds, how many did, and how near the best
    came."""
    if here.mean is None and measure.kind == "speedup":
        return NEVER
    if here.mean is None:
        some = f", {here.reached} of {here.runs} did" if here.reached else ""
        near = "" if here.best is None else f", best {here.best:.1f}%"
        return f"{NEVER} in {here.rounds}{some}{near}"
    return _with_deviation(here.mean, here.std, measure)


def _with_deviation(mean: float, std: float | None, measure: Measure) -> str:
    digits = _digits(measure, mean)
    return f"{mean:{digits}}" + ("" if std is None else f" ± {std:{_digits(measure, std)}}")


def _digits(measure: Measure, value: float) -> str:
    """As many digits as the papers print of such a figure."""
    if measure.kind == "weights":
        return ",.0f"
    if measure.kind in ("rounds", "total"):
        return ".0f" if value == round(value) else ".1f"
    percent = measure.kind in ("best", "end", "personal", "joining", "improvement")
    return ".2f" if percent or abs(value) >= 0.01 else ".2g"
