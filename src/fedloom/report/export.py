"""A comparison as files: CSV and JSON with plain numbers for machines, Markdown and LaTeX (booktabs) for papers and pages."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedloom.report.cells import Table, halves
from fedloom.report.sheet import (
    DIFFERENCE_HEADS,
    NOT_SIGNIFICANT,
    T_TEST_ONLY,
    Sheet,
    caption,
    difference_cells,
    difference_title,
    keys,
    overall,
    reading,
)
from fedloom.report.summary import Row, target_key

_ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "–": "--",
    "†": r"\dag{}",
    NOT_SIGNIFICANT: r"\textsuperscript{n}",
    T_TEST_ONLY: r"\textsuperscript{t}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}
"""What LaTeX would take for its own, and signs that older LaTeX does not know."""

_HELD_BACK = 8
"""Tables that LaTeX is given at a time: it gives up where it has to hold back some more than twice as many for pages to come."""

_AT_MOST_A_LINE = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}"
"""Before a box: smaller where it is wider than a line."""


def to_csv(sheets: Sequence[Sheet]) -> str:
    """A line for each setting and method: accuracies as shares, bytes, seconds; empty where there is no value."""
    return csv_text(
        [{**_settings(one, keys(sheets)), **_plain(row)} for one in sheets for row in one.rows], ["algorithm"]
    )


def differences_to_csv(sheets: Sequence[Sheet]) -> str:
    """A line for each setting, measure and difference, with both tests."""
    lines = [{**_settings(one, keys(sheets)), **line} for one in sheets for line in _differences(one)]
    return csv_text(lines, ["measure"])


def to_data(sheets: Sequence[Sheet]) -> dict[str, Any]:
    """The same as plain values for JSON: `methods` and `differences`, each with its setting."""
    return {
        "methods": [{**dataclasses.asdict(row), "setting": dict(one.changes)} for one in sheets for row in one.rows],
        "differences": [{"setting": dict(one.changes), **line} for one in sheets for line in _differences(one)],
    }


def to_markdown(sheets: Sequence[Sheet], title: str = "Comparison") -> str:
    """A page: all settings in one table where there are several, then two tables and the differences of each."""
    parts = [f"# {title}\n"]
    if len(sheets) > 1:
        parts += [f"{caption(sheets)}\n", _markdown(overall(sheets))]
    for one in sheets:
        parts += [f"## {one.setting}\n"] if one.setting else []
        parts += [_markdown(half) for half in halves(one.table)]
        parts += [_markdown_differences(one)] if one.tests[one.measure] else []
    parts += [f"{text}\n" for text in (_explained(sheets), *reading(sheets)) if text]
    return "\n".join(parts)


def to_latex(sheets: Sequence[Sheet], title: str = "Comparison") -> str:
    """Tables for a paper, to be had with `\\input`; they need the packages booktabs and graphicx, which makes a table that is
    wider than a line smaller. The best value of a column is bold."""
    note = " ".join([_explained(sheets), *reading(sheets)]).strip()
    tables = [_latex(overall(sheets), caption(sheets), "overall", note)] if len(sheets) > 1 else []
    for number, one in enumerate(sheets, start=1):
        of = f"{title}, {one.setting}" if one.setting else title
        place = f"-{number}" if one.setting else ""
        accuracy, cost = halves(one.table)
        tables.append(_latex(accuracy, f"{of}: {one.metric.noun}.", f"accuracy{place}", "" if tables else note))
        tables.append(_latex(cost, f"{of}: cost. Rounds and bytes until the target; * never.", f"cost{place}"))
    return latex_file(tables)


def csv_text(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """CSV with the keys of the first line, or `names` without any, as its header; empty where a value is None."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table; columns are right-aligned but for those on the `left`."""
    rule = ["---" if k in left else "---:" for k in range(len(heads))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, rule, *lines))


def latex_file(tables: Sequence[str]) -> str:
    """LaTeX tables as a file."""
    pages = ["\n".join(tables[k : k + _HELD_BACK]) for k in range(0, len(tables), _HELD_BACK)]
    return "% Needs \\usepackage{booktabs,graphicx}.\n\n" + "\n\\clearpage\n\n".join(pages)


def latex_table(
    heads: Sequence[str],
    lines: Iterable[Sequence[str]],
    caption: str,
    name: str,
    note: str = "",
    left: Collection[int] = (0,),
) -> str:
    """A LaTeX table of cells that are LaTeX already; columns are right-aligned but for those on the `left`."""
    sides = "".join("l" if k in left else "r" for k in range(len(heads)))
    body = "".join(f"    {' & '.join(line)} \\\\\n" for line in lines)
    return (
        f"\\begin{{table}}\n  \\centering\n  \\caption{{{escape_latex(caption)}}}\n  \\label{{tab:{name}}}\n"
        f"  \\setlength{{\\tabcolsep}}{{4pt}}\n  {_AT_MOST_A_LINE}{{%\n"
        f"  \\begin{{tabular}}{{{sides}}}\n    \\toprule\n    {' & '.join(map(escape_latex, heads))} \\\\\n    \\midrule\n"
        f"{body}    \\bottomrule\n  \\end{{tabular}}}}\n{_latex_note(note) if note else ''}\\end{{table}}\n"
    )


def escape_latex(text: str) -> str:
    """Text in which LaTeX finds nothing to obey."""
    return "".join(_ESCAPED.get(letter, letter) for letter in text)


def _settings(one: Sheet, names: Sequence[str]) -> dict[str, Any]:
    return {name: one.changes.get(name, "") for name in names}


def _differences(one: Sheet) -> Iterator[dict[str, Any]]:
    """The differences of a setting, measure by measure."""
    for name, tests in one.tests.items():
        yield from ({"measure": name, **dataclasses.asdict(found)} for found in tests)


def _plain(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {"algorithm": row.algorithm, "seeds": row.seeds, "rounds": row.rounds}
    spreads = {"final": row.final, "best": row.best, "mean_of_last": row.last}
    spreads |= {"personal": row.personal, "client_spread": row.client_std, "client_worst": row.client_worst}
    for reach in row.reaches:
        name = target_key(reach.target)
        line[f"reached_{name}"] = reach.reached
        spreads |= {f"rounds_to_{name}": reach.rounds, f"bytes_to_{name}": reach.bytes}
        spreads |= {f"seconds_to_{name}": reach.seconds}
    spreads |= {"bytes_down": row.bytes_down, "bytes_up": row.bytes_up, "seconds": row.seconds}
    spreads |= {"epsilon": row.epsilon, "simulated_seconds": row.simulated}
    for name, spread in spreads.items():
        line |= {name: spread and spread.mean, f"{name}_std": spread and spread.std}
    return {**line, "faults": row.faults}


def _explained(sheets: Sequence[Sheet]) -> str:
    """What the figures are."""
    rows = [row for one in sheets for row in one.rows]
    if not rows:
        return ""
    seeds, last = max(row.seeds for row in rows), sheets[0].last
    spread = f"Mean ± standard deviation over {seeds} seeds. " if seeds > 1 else ""
    return f"{spread}Mean of last: of the last {last} evaluations. Best: of any evaluation, chosen on the test data."


def _markdown(table: Table) -> str:
    return markdown_table(*_heads_and_lines(table, escape_markdown))


def _heads_and_lines(table: Table, shown: Callable[[str, bool], str]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells; `shown` makes text of a cell's, given whether it is the best of its column."""
    best = table.best_lines
    lines = [
        [shown(cell.text, number in best[k]) for k, cell in enumerate(line)] for number, line in enumerate(table.lines)
    ]
    return [_flat(column.title) for column in table.columns], lines


def escape_markdown(text: str, bold: bool = False) -> str:
    """Text for a cell of a Markdown table."""
    shown = re.sub(r"([|*_`\\])", r"\\\1", _flat(text))
    return f"**{shown}**" if bold else shown


def _markdown_differences(one: Sheet) -> str:
    """The differences of the sheet's measure as a table."""
    heads = ("Method", "minus", *DIFFERENCE_HEADS)
    metric = one.criterion.metric
    lines = [
        [escape_markdown(found.method), escape_markdown(found.other), *difference_cells(found, metric)]
        for found in one.tests[one.measure]
    ]
    return f"{difference_title(one)}:\n\n{markdown_table(heads, lines, left=(0, 1, 6))}"


def _flat(text: str) -> str:
    return ", ".join(text.splitlines())


def _latex(table: Table, caption: str, name: str, note: str = "") -> str:
    return latex_table(*_heads_and_lines(table, _latex_cell), caption, name, note)


def _latex_note(text: str) -> str:
    return f"  \\par\\smallskip\n  \\begin{{minipage}}{{\\linewidth}}\\footnotesize {escape_latex(text)}\\end{{minipage}}\n"


def _latex_cell(text: str, is_best: bool) -> str:
    shown = escape_latex(_flat(text))
    return f"\\textbf{{{shown}}}" if is_best else shown
