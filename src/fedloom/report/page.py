"""The report: one HTML page that holds all it needs, so that it opens from disk, on a phone and on paper."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fedloom.errors import InvalidValue
from fedloom.files import write_text
from fedloom.report import figures, recorded
from fedloom.report.curves import AXES
from fedloom.report.sections import (
    comparison_table,
    fault_table,
    headline,
    method_chips,
    recorded_section,
    what_was_run,
)
from fedloom.report.summary import RunSummary, by_algorithm, summarise

_AXIS_NAMES = {"round": "Rounds", "bytes": "Bytes", "seconds": "Seconds"}

_CAPTIONS = {
    "accuracy": "of the global model.",
    "personal_accuracy": "of each client's own model on its own test data.",
    "client_accuracy": "of the global model on the clients' own test data.",
    "new_client_accuracy": "of models adapted to clients that never trained, on their own test data.",
    "loss": "of the global model.",
    "training_loss": "of the clients that took part, mean over their local steps.",
    "pool_cosine": "between the models of the pool.",
}

OTHERS = 8
"""Further figures of the records that are drawn."""

PARTITIONS = 6
"""Seeds whose label distribution can be looked at."""


@dataclass(frozen=True)
class Slot:
    """A place for a figure. `variants` are its figures by the value of the `choice` (a row of buttons) that selects one."""

    name: str
    title: str
    caption: str
    variants: Mapping[str, go.Figure]
    choice: str | None = None

    @property
    def html(self) -> str:
        return (
            f"<figure><figcaption><b>{escape(self.title)}</b> {escape(self.caption)}</figcaption>"
            f'<div id="{self.name}" style="height:{self.height}px"></div></figure>'
        )

    @property
    def height(self) -> int:
        """In pixels; kept free until the figure is drawn, so that nothing jumps."""
        return int(max(figure.layout.height for figure in self.variants.values()))


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
    rows = summarise(runs, settings.get("targets", ()) if targets is None else targets)
    curves, spent, labels = _curve_slots(runs), _cost_slots(runs), _label_slot(runs)
    noted = _recorded_slots(runs)
    comparison = [_seed_slot(runs)] if max(row.seeds for row in rows) > 1 else []
    body = "".join(
        [
            headline(title, runs, rows),
            method_chips(runs) if len(rows) > 1 else "",
            "<main>",
            f"<section>{_head('Comparison' if len(rows) > 1 else 'Result')}",
            f"{comparison_table(runs, rows)}{_all(comparison)}</section>",
            _curve_section(runs, curves),
            f"<section>{_head('Bytes and time')}<div class=pair>{_all(spent)}</div></section>",
            ""
            if labels is None
            else f"<section>{_head('Data of the clients', _seed_choice(labels))}{labels.html}</section>",
            recorded_section(_all(noted)),
            fault_table(runs),
            what_was_run(runs, command or str(settings.get("command", ""))),
            "</main><footer>Made by fedloom. The page holds all its data and needs no network.</footer>",
        ]
    )
    slots = [*comparison, *curves, *spent, *([] if labels is None else [labels]), *noted]
    assets = files("fedloom.report") / "assets"
    return Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        css=(assets / "page.css").read_text(encoding="utf-8"),
        script=(assets / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        figures=_embedded(slots),
        body=body,
    )


def _curve_slots(runs: Sequence[RunSummary]) -> list[Slot]:
    """Learning curves of all that was recorded, over each axis that the runs have figures for."""
    band = " Mean over seeds, band ± one standard deviation." if _seeds(runs) > 1 else ""
    slots = [_curve_slot(runs, f"curve-{measure}", measure, caption) for measure, caption in _CAPTIONS.items()]
    others = [_curve_slot(runs, f"other-{k}", measure, "as recorded.") for k, measure in enumerate(_others(runs))]
    found = [slot for slot in (*slots, *others) if slot.variants]
    return [replace(slot, caption=slot.caption + band) if slot is found[0] else slot for slot in found]


def _curve_slot(runs: Sequence[RunSummary], name: str, measure: str, caption: str) -> Slot:
    recorded = any(measure in record for run in runs for record in run.records)
    drawn = {x: figures.learning_curves(runs, measure, x) for x in AXES if recorded}
    return Slot(
        name, figures.title_of(measure), caption, {x: figure for x, figure in drawn.items() if figure.data}, "x"
    )


def _others(runs: Sequence[RunSummary]) -> list[str]:
    """Up to `OTHERS` further figures that methods recorded, by name."""
    names = {
        name
        for run in runs
        for record in run.records
        for name, value in record.items()
        if isinstance(value, float) and name not in _CAPTIONS
    }
    return sorted(names)[:OTHERS]


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


def _cost_slots(runs: Sequence[RunSummary]) -> list[Slot]:
    slots = [
        Slot("bytes", "Bytes", "of a run; full colour down to the clients, pale up.", {"": figures.byte_bars(runs)})
    ]
    seconds = figures.second_bars(runs)
    if seconds.data:
        deviation = ", ± one standard deviation over seeds" if _seeds(runs) > 1 else ""
        caption = f"of a run, evaluation included{deviation}."
        slots.append(Slot("seconds", "Time", caption, {"": seconds}))
    return slots


def _seed_slot(runs: Sequence[RunSummary]) -> Slot:
    caption = "A dot a seed, a bar at their mean."
    return Slot("seeds", "Final accuracy of each seed.", caption, {"": figures.accuracy_by_seed(runs)})


def _label_slot(runs: Sequence[RunSummary]) -> Slot | None:
    """The label distribution of each seed; one figure where all seeds share it."""
    known: dict[str, RunSummary] = {}
    for run in runs:
        if run.label_counts and all(run.label_counts != other.label_counts for other in known.values()):
            known.setdefault(f"seed {run.seed}", run)
    if not known:
        return None
    first = next(iter(known.values()))
    clients = len(first.label_counts)
    shown = len(figures.shown_clients(clients))
    some = f" {shown} of the {clients:,} clients, evenly spaced." if shown < clients else ""
    samples = sum(map(sum, first.label_counts))
    variants = {
        name: figures.label_distribution(run.label_counts, run.class_names)
        for name, run in list(known.items())[:PARTITIONS]
    }
    caption = f"Each bubble's area is the number of a client's training samples of a class; {samples:,} in all.{some}"
    return Slot("labels", "Label distribution.", caption, variants, "labels")


def _recorded_slots(runs: Sequence[RunSummary]) -> list[Slot]:
    """What was recorded on request: of each method the first seed that has it."""
    drawn = [drawing for drawing in recorded.drawings(runs) if drawing.figure.data]
    return [Slot(f"recorded-{k}", one.title, one.caption, {"": one.figure}) for k, one in enumerate(drawn)]


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


def _seeds(runs: Sequence[RunSummary]) -> int:
    return max(len(group) for group in by_algorithm(runs).values())


def _embedded(slots: Sequence[Slot]) -> str:
    """The figures as JSON that no text in it can end the element it stands in."""
    plain: dict[str, Any] = {
        slot.name: {
            "choice": slot.choice,
            "variants": {value: json.loads(figure.to_json()) for value, figure in slot.variants.items()},
        }
        for slot in slots
    }
    text = json.dumps(plain, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
