"""A comparison as files: CSV and JSON with plain numbers for machines, Markdown and LaTeX
(booktabs) for papers and pages.
"""

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedloom.report.cells import Table, halves
from fedloom.report.sheet import (
    NOT_SIGNIFICANT,
    T_TEST_ONLY,
    Sheet,
    caption,
    explained,
    keys,
    overall,
    reading,
)
from fedloom.report.summary import TO_TARGET, Row, target_key

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
"""Characters that LaTeX would take for its own, and signs that older LaTeX does not know."""

# Before a box: smaller where it is wider than a line.
_AT_MOST_A_LINE = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}"


def to_csv(sheets: Sequence[Sheet]) -> str:
    """Return a line for each setting and method: accuracies as shares, bytes, seconds; empty where
    there is no value.
    """
    return csv_text(
        [line | _plain(row) for line, sheet in _settings(sheets) for row in sheet.rows],
        ["algorithm"],
    )


def differences_to_csv(sheets: Sequence[Sheet]) -> str:
    """Return a line for each setting, measure and difference, with both tests."""
    return csv_text(
        [line | test for line, sheet in _settings(sheets) for test in _differences(sheet)],
        ["measure"],
    )


def to_data(sheets: Sequence[Sheet]) -> dict[str, Any]:
    """Return rows and differences as plain values for JSON, each with its setting."""
    return {
        "methods": [
            {**dataclasses.asdict(row), "setting": dict(sheet.changes)}
            for sheet in sheets
            for row in sheet.rows
        ],
        "differences": [
            {"setting": dict(sheet.changes), **line}
            for sheet in sheets
            for line in _differences(sheet)
        ],
    }


def to_markdown(sheets: Sequence[Sheet], title: str = "Comparison") -> str:
    """Return a page: all settings in one table where there are several, then two tables and the
    differences of each.
    """
    blocks = [f"# {title}\n"]
    if len(sheets) > 1:
        blocks += [f"{caption(sheets)}\n", _markdown(overall(sheets))]
    for sheet in sheets:
        blocks += [f"## {sheet.setting}\n"] if sheet.setting else []
        blocks += map(_markdown, halves(sheet.table))
        heading, differences = sheet.differences
        blocks += [f"{heading}:\n", _markdown(differences)] if heading else []
    blocks += [f"{text}\n" for text in (*explained(sheets), *reading(sheets))]
    return "\n".join(blocks)


def to_latex(sheets: Sequence[Sheet], title: str = "Comparison") -> str:
    """Return tables for a paper, the best value of a column in bold; they need the packages
    booktabs and graphicx.
    """
    note = " ".join([*explained(sheets), *reading(sheets)])
    tables = [_latex(overall(sheets), caption(sheets), "overall", note)] if len(sheets) > 1 else []
    for number, sheet in enumerate(sheets, start=1):
        name = f"{title}, {sheet.setting}" if sheet.setting else title
        suffix = f"-{number}" if sheet.setting else ""
        accuracy, cost = halves(sheet.table)
        tables.append(
            _latex(
                accuracy,
                f"{name}: {sheet.metric.noun}.",
                f"accuracy{suffix}",
                "" if tables else note,
            )
        )
        tables.append(
            _latex(
                cost, f"{name}: cost. Rounds and bytes until the target; * never.", f"cost{suffix}"
            )
        )
    return "% Needs \\usepackage{booktabs,graphicx}.\n\n" + "\n".join(tables)


def csv_text(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return CSV with the keys of `lines[0]`, or `names` without lines, as its header; empty where
    a value is None.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def markdown_table(
    heads: Sequence[str], lines: Iterable[Sequence[str]], texts: Collection[int] = (0,)
) -> str:
    """Return a Markdown table of cells that are Markdown already; columns are right-aligned but for
    the `texts`.
    """
    rule = ["---" if k in texts else "---:" for k in range(len(heads))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, rule, *lines))


def escape_latex(text: str) -> str:
    """Return text in which LaTeX finds nothing to obey."""
    return "".join(_ESCAPED.get(letter, letter) for letter in text)


def escape_markdown(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return re.sub(r"([|*_`\\])", r"\\\1", _flat(text))


def _settings(sheets: Sequence[Sheet]) -> list[tuple[dict[str, Any], Sheet]]:
    return [
        ({name: sheet.changes.get(name, "") for name in keys(sheets)}, sheet) for sheet in sheets
    ]


def _differences(sheet: Sheet) -> Iterator[dict[str, Any]]:
    for name, tests in sheet.tests.items():
        yield from ({"measure": name, **dataclasses.asdict(test)} for test in tests)


def _plain(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {"algorithm": row.algorithm, "seeds": row.seeds, "rounds": row.rounds}
    spreads = {"final": row.final, "best": row.best, "mean_of_last": row.last}
    spreads |= {
        "personal": row.personal,
        "client_spread": row.client_std,
        "client_worst": row.client_worst,
    }
    for reach in row.reaches:
        name = target_key(reach.target)
        line[f"reached_{name}"] = reach.reached
        spreads |= {f"{cost}_to_{name}": getattr(reach, cost) for cost in TO_TARGET}
    spreads |= {"bytes_down": row.bytes_down, "bytes_up": row.bytes_up, "seconds": row.seconds}
    spreads |= {"epsilon": row.epsilon, "simulated_seconds": row.simulated}
    for name, spread in spreads.items():
        line |= {name: spread and spread.mean, f"{name}_std": spread and spread.std}
    return {**line, "faults": row.faults}


def _markdown(table: Table) -> str:
    return markdown_table(*_heads_and_lines(table, escape_markdown, "**{}**"))


def _latex(table: Table, caption: str, name: str, note: str = "") -> str:
    heads, lines = _heads_and_lines(table, lambda text: escape_latex(_flat(text)), "\\textbf{{{}}}")
    body = "".join(f"    {' & '.join(line)} \\\\\n" for line in lines)
    footnote = f"\\footnotesize {escape_latex(note)}\\end{{minipage}}\n"
    return (
        f"\\begin{{table}}\n  \\centering\n  \\caption{{{escape_latex(caption)}}}\n  \\label{{tab:{name}}}\n"
        f"  \\setlength{{\\tabcolsep}}{{4pt}}\n  {_AT_MOST_A_LINE}{{%\n"
        f"  \\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}\n    \\toprule\n"
        f"    {' & '.join(map(escape_latex, heads))} \\\\\n    \\midrule\n"
        f"{body}    \\bottomrule\n  \\end{{tabular}}}}\n"
        + (f"  \\par\\smallskip\n  \\begin{{minipage}}{{\\linewidth}}{footnote}" if note else "")
        + "\\end{table}\n"
    )


def _heads_and_lines(
    table: Table, escape: Callable[[str], str], bold: str
) -> tuple[list[str], list[list[str]]]:
    """Return titles and escaped cells, the best of a column in the format `bold`."""
    best = table.best_lines
    lines = [
        [
            bold.format(escape(cell.text)) if k in best[column] else escape(cell.text)
            for column, cell in enumerate(line)
        ]
        for k, line in enumerate(table.lines)
    ]
    return [_flat(column.title) for column in table.columns], lines


def _flat(text: str) -> str:
    return ", ".join(text.splitlines())
