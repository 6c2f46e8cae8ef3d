"""The report: one HTML page that holds all it needs, so that it opens from disk, on a phone and on paper."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fedloom.errors import InvalidValue
from fedloom.files import write_text
from fedloom.report import figures
from fedloom.report.clients import client_table
from fedloom.report.curves import AXES
from fedloom.report.sections import (
    comparison_table,
    fault_table,
    headline,
    method_chips,
    recorded_section,
    what_was_run,
)
from fedloom.report.slots import Slot, ablation_slots, cost_slots, curve_slots, label_slot, recorded_slots, seed_slots
from fedloom.report.summary import RunSummary, summarise

_AXIS_NAMES = {"round": "Rounds", "bytes": "Bytes", "seconds": "Seconds"}


def write_report(
    path: Path, title: str, runs: Sequence[RunSummary], targets: Sequence[float] | None = None, command: str = ""
) -> None:
    """Write the report of `runs` (one run, or methods x seeds on the same task) to `path`, all of it or nothing.

    `targets` are the accuracies in (0, 1] whose rounds and bytes the table shows, `command` the line that repeats the runs;
    where they are not given, those of the first run's configuration (`targets`, `command`) are taken. Raises `InvalidValue`
    without runs, or for a target that is not a share.
    """
    page = render(title, runs, targets, command)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)


def render(
    title: str, runs: Sequence[RunSummary], targets: Sequence[float] | None = None, command: str = ""
) -> str:  # fmt: skip
    """The page as text; see `write_report`."""
    if not runs:
        raise InvalidValue("a report needs at least one run")
    settings = runs[0].configuration
    aims = list(settings.get("targets", ()) if targets is None else targets)
    repeat = command or str(settings.get("command", ""))
    rows = summarise(runs, aims)
    curves, spent, labels = curve_slots(runs), cost_slots(runs), label_slot(runs)
    noted = recorded_slots(runs)
    comparison, effects = seed_slots(runs), ablation_slots(runs)
    body = "".join(
        [
            headline(title, runs, rows),
            method_chips(runs) if len(rows) > 1 else "",
            "<main>",
            f"<section>{_head('Comparison' if len(rows) > 1 else 'Result')}",
            f"{comparison_table(runs, rows)}{_all(comparison)}</section>",
            f"<section>{_head('What makes the difference')}<div class=pair>{_all(effects)}</div></section>"
            if effects
            else "",
            _curve_section(runs, curves),
            f"<section>{_head('Bytes and time')}<div class=pair>{_all(spent)}</div></section>",
            _client_section(runs, labels),
            recorded_section(_all(noted)),
            fault_table(runs),
            what_was_run(runs, repeat),
            "</main><footer>Made by fedloom. The page holds all its data and needs no network.</footer>",
        ]
    )
    slots = [*comparison, *effects, *curves, *spent, *([] if labels is None else [labels]), *noted]
    assets = files("fedloom.report") / "assets"
    return Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        css=(assets / "page.css").read_text(encoding="utf-8"),
        script=(assets / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        figures=_embedded({slot.name: {"choice": slot.choice, "variants": _plain(slot.variants)} for slot in slots}),
        about=_embedded({"title": title, "targets": aims, "command": repeat}),
        body=body,
    )


def about(path: Path) -> dict[str, Any]:
    """What a report says of itself: `title`, `targets` and `command` as `write_report` was told them; empty where it does not
    exist or is no report."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(r'<script type="application/json" id="about">(.*?)</script>', text, re.DOTALL)
    return dict(json.loads(found[1])) if found else {}


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
        f"<section>{_head('Learning curves', _choice('x', 'Over', {x: _AXIS_NAMES[x] for x in axes}))}"
        f"{slots[0].html}<div class=pair>{_all(slots[1:])}</div>{note}</section>"
    )


def _client_section(runs: Sequence[RunSummary], labels: Slot | None) -> str:
    if labels is None:
        return ""
    return f"<section>{_head('The clients and their data', _seed_choice(labels))}{labels.html}{client_table(runs)}</section>"


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


def _head(title: str, beside: str = "") -> str:
    return f"<div class=head><h2>{title}</h2>{beside}</div>"


def _all(slots: Sequence[Slot]) -> str:
    return "".join(slot.html for slot in slots)


def _plain(variants: Mapping[str, go.Figure]) -> dict[str, Any]:
    return {value: json.loads(figure.to_json()) for value, figure in variants.items()}


def _embedded(plain: Mapping[str, Any]) -> str:
    """Plain values as JSON that no text in it can end the element it stands in."""
    text = json.dumps(plain, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
