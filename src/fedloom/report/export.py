"""A comparison as files: CSV and JSON with plain numbers for machines, Markdown and LaTeX
(booktabs) for papers and pages.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.report.layouts import templates
from fedloom.report.method_settings import settings_table, tuning_notes
from fedloom.report.sheet import Sheet, caption, explained, keys, overall, reading
from fedloom.report.summary import TO_TARGET, Spread, target_key

if TYPE_CHECKING:
    import pandas


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
    return csv_text(lines, ["method"])


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
    """Return a page with the tables of all settings.

    Several settings are in one table first. Then each has two tables and its differences.

    Args:
        sheets: The comparison of each setting.
        title: Heading of the page.

    Returns:
        The text of a Markdown page.
    """
    several = len(sheets) > 1
    return (
        templates()
        .get_template("comparison.md")
        .render(
            title=title,
            sheets=sheets,
            caption=caption(sheets) if several else "",
            overall=overall(sheets) if several else None,
            settings_table=settings_table,
            notes=[*explained(sheets), *tuning_notes(sheets), *reading(sheets)],
        )
    )


def to_latex(sheets: Sequence[Sheet], title: str = "Comparison") -> str:
    """Return tables for a paper, with the best value of a column in bold.

    Args:
        sheets: The comparison of each setting.
        title: Beginning of each caption.

    Returns:
        LaTeX tables; they need the packages booktabs and graphicx.
    """
    tables = [(overall(sheets), caption(sheets), "overall")] if len(sheets) > 1 else []
    for number, sheet in enumerate(sheets, start=1):
        name = f"{title}, {sheet.setting}" if sheet.setting else title
        suffix = f"-{number}" if sheet.setting else ""
        scores, costs = sheet.halves()
        cost_caption = f"{name}: cost. Rounds and bytes until the target; * never."
        tables.append((scores, f"{name}: {sheet.metric.noun}.", f"accuracy{suffix}"))
        tables.append((costs, cost_caption, f"cost{suffix}"))
    note = " ".join([*explained(sheets), *reading(sheets)])
    return templates().get_template("comparison.tex").render(tables=tables, note=note)


def csv_text(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return CSV with a header; a value None is an empty field.

    Args:
        lines: Values by column. All lines have the keys of the first line.
        names: Columns of a table without lines.

    Returns:
        The text, with Unix line ends.
    """
    import pandas

    frame = pandas.DataFrame(lines, columns=list(lines[0]) if lines else names, dtype=object)
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text


def markdown_table(table: "pandas.DataFrame") -> str:
    """Return a table of cells in Markdown; columns are right-aligned but for the first."""
    template: Any = templates().get_template("table.md").module
    return str(template.table(table))
