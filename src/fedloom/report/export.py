"""A comparison as files: CSV and JSON with plain numbers for machines, Markdown and LaTeX
(booktabs) for papers and pages.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.report.cells import best_cells
from fedloom.report.method_settings import settings_table, tuning_notes
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
from fedloom.report.summary import TO_TARGET, Spread, target_key

if TYPE_CHECKING:
    import pandas

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
"""Characters that LaTeX would interpret, and signs that older LaTeX does not know."""

_LATEX = r"""\begin{{table}}
  \centering
  \caption{{{caption}}}
  \label{{tab:{name}}}
  \setlength{{\tabcolsep}}{{4pt}}
  \resizebox{{\ifdim\width>\linewidth\linewidth\else\width\fi}}{{!}}{{%
  \begin{{tabular}}{{{columns}}}
    \toprule
    {heads} \\
    \midrule
{lines}    \bottomrule
  \end{{tabular}}}}
{note}\end{{table}}
"""
"""A table; a table that is wider than the line is made smaller."""

_NOTE = r"""  \par\smallskip
  \begin{{minipage}}{{\linewidth}}\footnotesize {}\end{{minipage}}
"""


def to_csv(sheets: Sequence[Sheet]) -> str:
    """Return a line for each setting and method: accuracies as shares, bytes, seconds; empty where
    there is no value.
    """
    lines = []
    for setting, sheet in _settings(sheets):
        for row in sheet.rows.reset_index().to_dict("records"):
            line = dict(setting)
            for name, value in row.items():
                line[name] = value.mean if isinstance(value, Spread) else value
                if not isinstance(value, int | str):
                    line[f"{name}_std"] = value and value.std
            lines.append(line)
    return csv_text(lines, ["algorithm"])


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
            {**_row(sheet, method), "setting": dict(sheet.changes)}
            for sheet in sheets
            for method in sheet.rows.index
        ],
        "differences": [
            {"setting": dict(sheet.changes), **line}
            for sheet in sheets
            for line in _differences(sheet)
        ],
    }


def _settings(sheets: Sequence[Sheet]) -> list[tuple[dict[str, Any], Sheet]]:
    return [
        ({name: sheet.changes.get(name, "") for name in keys(sheets)}, sheet) for sheet in sheets
    ]


def _differences(sheet: Sheet) -> list[dict[str, Any]]:
    return [
        {"measure": name, **dataclasses.asdict(test)}
        for name, tests in sheet.tests.items()
        for test in tests
    ]


def _row(sheet: Sheet, method: str) -> dict[str, Any]:
    """Return a row for JSON, its spreads as tables and the costs of each target in one table."""
    row = {
        name: dataclasses.asdict(value) if isinstance(value, Spread) else value
        for name, value in sheet.rows.loc[method].items()
    }
    reaches = [
        {
            "target": target,
            **{cost: row.pop(f"{cost}_to_{target_key(target)}") for cost in TO_TARGET},
            "reached": row.pop(f"reached_{target_key(target)}"),
            "seeds": row["seeds"],
            "measured": sheet.measured(target, method),
        }
        for target in dict.fromkeys(sheet.targets)
    ]
    renamed = {
        "mean_of_last": "last",
        "client_spread": "client_std",
        "simulated_seconds": "simulated",
    }
    row = {renamed.get(name, name): value for name, value in row.items()}
    metric = dataclasses.asdict(sheet.metric)
    return {
        "algorithm": method,
        **row,
        "reaches": reaches,
        "metric": metric,
        "timed": sheet.timed(method),
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
        blocks += map(_markdown, sheet.halves())
        heading, differences = sheet.differences
        blocks += [f"{heading}:\n", _markdown(differences)] if heading else []
        settings = settings_table(sheet)
        blocks += [] if settings is None else ["Settings of each method:\n", _markdown(settings)]
    blocks += [
        f"{text}\n" for text in (*explained(sheets), *tuning_notes(sheets), *reading(sheets))
    ]
    return "\n".join(blocks)


def to_latex(sheets: Sequence[Sheet], title: str = "Comparison") -> str:
    """Return tables for a paper, the best value of a column in bold; they need the packages
    booktabs and graphicx.
    """
    captioned = [(overall(sheets), caption(sheets), "overall")] if len(sheets) > 1 else []
    cost_note = "cost. Rounds and bytes until the target; * never."
    for number, sheet in enumerate(sheets, start=1):
        name = f"{title}, {sheet.setting}" if sheet.setting else title
        suffix = f"-{number}" if sheet.setting else ""
        accuracy, cost = sheet.halves()
        captioned += [
            (accuracy, f"{name}: {sheet.metric.noun}.", f"accuracy{suffix}"),
            (cost, f"{name}: {cost_note}", f"cost{suffix}"),
        ]
    note = " ".join([*explained(sheets), *reading(sheets)])
    notes = [note, *[""] * len(captioned)]
    tables = [_latex(*table, note) for table, note in zip(captioned, notes, strict=False)]
    return "% Needs \\usepackage{booktabs,graphicx}.\n\n" + "\n".join(tables)


def csv_text(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return CSV with the keys of `lines[0]`, or `names` without lines, as its header; empty where
    a value is None.
    """
    import pandas

    frame = pandas.DataFrame(lines, columns=list(lines[0]) if lines else names, dtype=object)
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text


def markdown_table(
    heads: Sequence[str], lines: Iterable[Sequence[str]], texts: Collection[int] = (0,)
) -> str:
    """Return a Markdown table of cells that are Markdown already; columns are right-aligned but for
    the `texts`.
    """
    rule = ["---" if k in texts else "---:" for k in range(len(heads))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, rule, *lines))


def escape_latex(text: str) -> str:
    """Return text without characters that LaTeX interprets."""
    return "".join(_ESCAPED.get(letter, letter) for letter in text)


def escape_markdown(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return re.sub(r"([|*_`\\])", r"\\\1", _flat(text))


def _markdown(table: "pandas.DataFrame") -> str:
    return markdown_table(*_heads_and_lines(table, escape_markdown, "**{}**"))


def _latex(table: "pandas.DataFrame", caption: str, name: str, note: str) -> str:
    heads, lines = _heads_and_lines(table, lambda text: escape_latex(_flat(text)), r"\textbf{{{}}}")
    return _LATEX.format(
        caption=escape_latex(caption),
        name=name,
        columns="l" + "r" * (len(heads) - 1),
        heads=" & ".join(map(escape_latex, heads)),
        lines="".join(f"    {' & '.join(line)} \\\\\n" for line in lines),
        note=_NOTE.format(escape_latex(note)) if note else "",
    )


def _heads_and_lines(
    table: "pandas.DataFrame", escape: Callable[[str], str], bold: str
) -> tuple[list[str], list[list[str]]]:
    """Return titles and escaped cells, the best of a column in the format `bold`."""
    texts = table.map(lambda cell: escape(cell.text))
    texts = texts.mask(best_cells(table), texts.map(bold.format))
    return [_flat(column.title) for column in table], texts.to_numpy().tolist()


def _flat(text: str) -> str:
    return ", ".join(text.splitlines())
