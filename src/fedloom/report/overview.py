"""The page over all settings of a comparison: every method in every setting, and what the settings do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from fedloom.report.comparing import NO_BREAK, overall_table
from fedloom.report.figures import styles
from fedloom.report.page import Told, effect_section, head, page_of
from fedloom.report.sections import Tile, cost_tiles, fault_table, headline, method_chips, what_was_run
from fedloom.report.sheet import Sheet, faults_in
from fedloom.report.slots import ablation_slots
from fedloom.report.summary import RunSummary
from fedloom.state.files import write_text


def write_overview(
    path: Path, title: str, sheets: Sequence[Sheet], runs: Sequence[RunSummary], pages: Mapping[str, str], command: str
) -> None:
    """Write the page of all settings to `path`, all of it or nothing.

    `sheets` are the settings, at least one, `runs` those of all, `pages` the report of each setting by its label, as a path
    from the folder that `path` lies in.
    """
    rows = [row for one in sheets for row in one.rows]
    methods = len({row.algorithm for row in rows})
    tiles: list[Tile] = [
        ("Settings", str(len(sheets)), ""),
        ("Methods", str(methods), ""),
        *cost_tiles(len(runs), rows),
    ]
    effects = ablation_slots(runs, sheets[0].score)
    links = "".join(
        f'<li><a href="{escape(quote(pages[one.setting]))}">{escape(one.setting.replace(" ", NO_BREAK))}</a>'
        f"{f' <small>{escape(text)}</small>' if (text := faults_in(one)) else ''}</li>"
        for one in sheets
    )
    body = [
        headline(title, runs, tiles),
        method_chips(runs) if methods > 1 else "",
        "<main>",
        f"<section>{head('All settings')}{overall_table(sheets, styles(runs))}"
        f"<h3>Each setting by itself, with its curves</h3><ul class=pages>{links}</ul></section>",
        effect_section(effects),
        fault_table(runs),
        what_was_run(runs, command),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page_of("".join(body), effects, Told.of(title, sheets[0], command)))
