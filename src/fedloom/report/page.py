"""The report: one HTML page that holds all it needs, so that it opens from disk, on a phone and on paper."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fedloom.errors import InvalidValue
from fedloom.report import figures
from fedloom.report.clients import client_table
from fedloom.report.comparing import comparison_table, difference_table
from fedloom.report.curves import AXES
from fedloom.report.sections import (
    fault_table,
    headline,
    method_chips,
    recorded_section,
    result_tiles,
    what_was_run,
)
from fedloom.report.sheet import Score, Sheet
from fedloom.report.sheet import sheet as sheet_of
from fedloom.report.slots import Slot, ablation_slots, cost_slots, curve_slots, label_slot, recorded_slots, seed_slots
from fedloom.report.summary import LAST, RunSummary
from fedloom.state.files import write_text

_AXIS_NAMES = {"round": "Rounds", "bytes": "Bytes", "seconds": "Seconds"}


def write_report(
    path: Path,
    title: str,
    runs: Sequence[RunSummary],
    targets: Sequence[float] | None = None,
    command: str = "",
    sheet: Sheet | None = None,
    first: str = "",
    by: Score | None = None,
) -> None:
    """Write the report of `runs` (one run, or methods x seeds on the same task) to `path`, all of it or nothing.

    `targets` are the accuracies in (0, 1] whose rounds and bytes the table shows, `command` the line that repeats the runs;
    where they are not given, those of the first run's configuration (`targets`, `command`) are taken. `sheet` is the
    comparison of these runs where it is known (with its own targets), so that the page says what is said elsewhere. `first` is
    the section that the page is about and begins with: `recorded`, `clients`, `curves`, `effects`, or the usual order. What
    parameters and settings do is shown by the sheet's measure, or `by` another score. Raises `InvalidValue` without runs, or
    for a target that is not a share.
    """
    page = render(title, runs, targets, command, sheet, first, by)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)


def render(
    title: str,
    runs: Sequence[RunSummary],
    targets: Sequence[float] | None = None,
    command: str = "",
    sheet: Sheet | None = None,
    first: str = "",
    by: Score | None = None,
) -> str:
    """The page as text; see `write_report`."""
    if not runs:
        raise InvalidValue("a report needs at least one run")
    settings = runs[0].configuration
    if sheet is None:
        sheet = sheet_of(runs, list(settings.get("targets", ()) if targets is None else targets))
    repeat = command or str(settings.get("command", ""))
    curves, spent, labels = curve_slots(runs), cost_slots(runs), label_slot(runs)
    noted = recorded_slots(runs)
    seeds, effects = seed_slots(runs), ablation_slots(runs, by or sheet.score)
    several = len(sheet.rows) > 1
    sections = {
        "result": f"<section>{head('Comparison' if several else 'Result')}{comparison_table(sheet, figures.styles(runs))}"
        f"{difference_table(sheet)}{_all(seeds)}</section>",
        "effects": effect_section(effects),
        "curves": _curve_section(runs, curves),
        "costs": f"<section>{head('Bytes and time')}<div class=pair>{_all(spent)}</div></section>",
        "clients": _client_section(runs, labels),
        "recorded": recorded_section(_all(noted)),
    }
    body = [
        headline(title, runs, result_tiles(runs, sheet)),
        method_chips(runs) if several else "",
        "<main>",
        *(sections[name] for name in sorted(sections, key=lambda name: name != first)),
        fault_table(runs),
        what_was_run(runs, repeat),
    ]
    slots = [*seeds, *effects, *curves, *spent, *([] if labels is None else [labels]), *noted]
    return page_of("".join(body), slots, Told.of(title, sheet, repeat))


@dataclass(frozen=True)
class Told:
    """What a page was told, so that it can be written anew."""

    title: str
    targets: tuple[float, ...] = ()
    command: str = ""
    last: int = LAST
    against: str = "best"
    measure: str = "last"

    @classmethod
    def of(cls, title: str, sheet: Sheet, command: str) -> Told:
        targets = tuple(reach.target for reach in sheet.rows[0].reaches)
        return cls(title, targets, command, sheet.last, sheet.against, sheet.measure)


def page_of(body: str, slots: Sequence[Slot], told: Told) -> str:
    """A page: what it shows (up to the end of `<main>`), the figures in it, and what it was told."""
    assets = files("fedloom.report") / "assets"
    return Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(told.title),
        css=(assets / "page.css").read_text(encoding="utf-8"),
        script=(assets / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        figures=_embedded({slot.name: {"choice": slot.choice, "variants": _plain(slot.variants)} for slot in slots}),
        about=_embedded(dataclasses.asdict(told)),
        body=f"{body}</main><footer>Made by fedloom. The page holds all its data and needs no network.</footer>",
    )


def told(path: Path) -> Told | None:
    """What the report there was told; None where there is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(r'<script type="application/json" id="about">(.*?)</script>', text, re.DOTALL)
    if found is None:
        return None
    known = json.loads(found[1])
    return Told(**{**known, "targets": tuple(known["targets"])})


def effect_section(slots: Sequence[Slot]) -> str:
    """What parameters and settings do; empty where none differ."""
    return f"<section>{head('What makes the difference')}<div class=pair>{_all(slots)}</div></section>" if slots else ""


def _curve_section(runs: Sequence[RunSummary], slots: Sequence[Slot]) -> str:
    if not slots:
        return ""
    axes = [x for x in AXES if any(x in slot.variants for slot in slots)]
    long = max(len(run.records) for run in runs) > figures.POINTS
    note = (
        f"<p class=caption>Long curves are drawn with about {figures.POINTS} of their points: of every stretch the lowest and "
        "the highest. Tables use every round.</p>"
        if long
        else ""
    )
    return (
        f"<section>{head('Learning curves', _choice('x', 'Over', {x: _AXIS_NAMES[x] for x in axes}))}"
        f"{slots[0].html}<div class=pair>{_all(slots[1:])}</div>{note}</section>"
    )


def _client_section(runs: Sequence[RunSummary], labels: Slot | None) -> str:
    if labels is None:
        return ""
    return f"<section>{head('The clients and their data', _seed_choice(labels))}{labels.html}{client_table(runs)}</section>"


def _seed_choice(slot: Slot) -> str:
    return _choice("labels", "Of", {name: name for name in slot.variants})


def _choice(name: str, text: str, values: Mapping[str, str]) -> str:
    """A row of buttons of which one is pressed; none when there is nothing to choose."""
    if len(values) < 2:
        return ""
    buttons = "".join(
        f'<button data-choice="{name}" data-value="{escape(value)}" aria-pressed={"true" if not k else "false"}>'
        f"{escape(label)}</button>"
        for k, (value, label) in enumerate(values.items())
    )
    return f"<div class=choice role=group aria-label={text}>{text} {buttons}</div>"


def head(title: str, beside: str = "") -> str:
    """The heading of a section, with what there is to choose beside it."""
    return f"<div class=head><h2>{title}</h2>{beside}</div>"


def _all(slots: Sequence[Slot]) -> str:
    return "".join(slot.html for slot in slots)


def _plain(variants: Mapping[str, go.Figure]) -> dict[str, Any]:
    return {value: json.loads(figure.to_json()) for value, figure in variants.items()}


def _embedded(plain: Mapping[str, Any]) -> str:
    """Plain values as JSON that no text in it can end the element it stands in."""
    text = json.dumps(plain, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
