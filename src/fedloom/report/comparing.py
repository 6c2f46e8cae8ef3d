"""The tables of the report's page that set methods side by side, as HTML, each with how to read it.

What they say comes from the sheets that the terminal and the files show, so they cannot disagree. Everything that comes from a
user goes through `html.escape`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from fedloom.report.figures import Style
from fedloom.report.sheet import Sheet, difference_cells, difference_title, faults_in, keys, overall, reading
from fedloom.report.tables import Table

NO_BREAK = "\u00a0"


def comparison_table(sheet: Sheet, looks: Mapping[str, Style]) -> str:
    """The methods of one setting; columns sort, the best value of a column is marked, and so is what is not shown to differ."""
    return (
        f"{_sortable(_worth_showing(sheet.table), looks)}"
        f"<p class=caption>{escape(_figures(sheet))}</p>{_sentences(reading([sheet]))}"
    )


def difference_table(sheet: Sheet) -> str:
    """The differences of the sheet's measure from the reference, both tests and the verdict (`reading`); empty where nothing is
    tested."""
    tests = sheet.tests[sheet.measure]
    if not tests:
        return ""
    heads = (f"minus {tests[0].other}", "Difference", "95 % interval", "p (t)", "p (exact)", "Verdict")
    line = "".join(f"<th scope=col>{_title(head)}</th>" for head in heads)
    body = "".join(
        f'<tr data-method="{escape(found.method)}"><th scope=row>{breakable(found.method)}</th>'
        f"{''.join(f'<td>{escape(text)}</td>' for text in difference_cells(found))}</tr>"
        for found in tests
    )
    return (
        f"<h3>{escape(difference_title(sheet))}</h3>"
        f"<div class=scroll><table class=differences><thead><tr>{line}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def overall_table(sheets: Sequence[Sheet], looks: Mapping[str, Style]) -> str:
    """One measure of every method in every setting, and the mean of a method's ranks; columns sort."""
    seeds = {row.seeds for sheet in sheets for row in sheet.rows}
    text = f"{_spread(seeds)}{sheets[0].score.title}, in per cent, by {', '.join(keys(sheets))}. Rank 1 is the best."
    return f"{_sortable(overall(sheets), looks)}<p class=caption>{escape(text)}</p>{_sentences(reading(sheets))}"


def breakable(key: str) -> str:
    """A key or a name as HTML that may be broken behind its dots, underscores, brackets and signs of equality."""
    return re.sub(r"([._(=])", r"\1<wbr>", escape(key))


def _sortable(table: Table, looks: Mapping[str, Style]) -> str:
    """A table whose first column names methods, as HTML."""
    heads = "".join(
        f"<th scope=col aria-sort=none data-first={'ascending' if column.best == 'smallest' or not k else 'descending'}>"
        f"<button>{_title(column.title)}</button></th>"
        for k, column in enumerate(table.columns)
    )
    best = [table.best(k) for k in range(len(table.columns))]
    lines = []
    for number, line in enumerate(table.lines):
        name = line[0].text
        cells = [
            f'<th scope=row data-value="{escape(name)}"><span class=swatch style="background:{looks[name].colour}">'
            f"</span>{breakable(name)}</th>"
        ]
        for k, cell in enumerate(line[1:], start=1):
            value = "" if cell.value is None else f' data-value="{escape(str(cell.value))}"'
            cells.append(f"<td{' class=best' if number in best[k] else ''}{value}>{escape(cell.text)}</td>")
        lines.append(f'<tr data-method="{escape(name)}">{"".join(cells)}</tr>')
    return f"<div class=scroll><table class=compare><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _title(text: str) -> str:
    """A column's title; where it has several lines, each stands by itself."""
    return "<br>".join(escape(line) for line in text.replace(" %", f"{NO_BREAK}%").splitlines())


def _worth_showing(table: Table) -> Table:
    """The table without the columns that say nothing here: seeds and rounds that all methods share, faults of none."""
    silent = {
        k
        for k, column in enumerate(table.columns)
        if (column.title in ("Seeds", "Rounds") and len({line[k].text for line in table.lines}) == 1)
        or (column.title == "Faults" and all(line[k].text == "0" for line in table.lines))
    }
    return table.part([k for k in range(len(table.columns)) if k not in silent])


def _spread(seeds: set[int]) -> str:
    if seeds == {1}:
        return ""
    return f"Mean ± standard deviation over {'to'.join(f' {n} ' for n in sorted({min(seeds), max(seeds)})).strip()} seeds. "


def _figures(sheet: Sheet) -> str:
    """What the figures of the comparison are."""
    rows = sheet.rows
    text = (
        f"{_spread({row.seeds for row in rows})}Accuracy on the test set: final after the last round, best of any evaluation "
        f"(chosen on the test data), mean of the last {sheet.last} evaluations."
    )
    if any(row.personal is not None for row in rows):
        text += (
            " Clients' own: accuracy of each client's own model on its own test data, or of the global model where the "
            "clients' were not evaluated, over all samples; spread: standard deviation over the clients, each counted alike; "
            "worst tenth: mean over the tenth of the clients with the lowest."
        )
    if rows and rows[0].reaches:
        text += " Rounds, and bytes down and up, until the first evaluation at or above the target; * never reached"
        text += f", 2× is in half as many rounds as {rows[0].algorithm}." if len(rows) > 1 else "."
    return f"{text} {sentence[0].upper()}{sentence[1:]}." if (sentence := faults_in(sheet)) else text


def _sentences(texts: Sequence[str]) -> str:
    return "".join(f"<p class=caption>{escape(text)}</p>" for text in texts)
