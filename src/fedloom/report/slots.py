"""The places of a report and the figures in them: what runs can show, for the page and for image files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import plotly.graph_objects as go

from fedloom.report import figures, recorded
from fedloom.report.ablation import ablation_figure, ablations
from fedloom.report.curves import AXES
from fedloom.report.sheet import Score, score
from fedloom.report.summary import RunSummary, by_algorithm

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

ABLATIONS = 6
"""Parameters that differ between runs whose effect is drawn."""

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


def curve_slots(runs: Sequence[RunSummary]) -> list[Slot]:
    """Learning curves of all that was recorded, over each axis that the runs have figures for."""
    band = " Mean over seeds, band ± one standard deviation." if _seeds(runs) > 1 else ""
    slots = [_curve_slot(runs, f"curve-{measure}", measure, caption) for measure, caption in _CAPTIONS.items()]
    others = [_curve_slot(runs, f"other-{_file_name(measure)}", measure, "as recorded.") for measure in _others(runs)]
    found = [slot for slot in (*slots, *others) if slot.variants]
    return [replace(slot, caption=slot.caption + band) if slot is found[0] else slot for slot in found]


def image_slots(runs: Sequence[RunSummary], by: Score | None = None) -> list[Slot]:
    """Every figure that the runs, judged `by` a score (None: the usual one), have something for; landscapes of several methods
    also side by side in one."""
    labels = label_slot(runs)
    found = [*seed_slots(runs), *ablation_slots(runs, by or score()), *curve_slots(runs), *cost_slots(runs)]
    beside = recorded.side_by_side(runs)
    together = [] if beside is None else [Slot(beside.name, beside.title, beside.caption, {"": beside.figure})]
    return [*found, *([] if labels is None else [labels]), *recorded_slots(runs), *together]


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


def ablation_slots(runs: Sequence[RunSummary], by: Score) -> list[Slot]:
    """The score over every parameter or setting that differs between the runs."""
    spread = ", mean over seeds ± one standard deviation" if _seeds(runs) > 1 else ""
    return [
        Slot(
            f"ablation-{_file_name(one.name)}",
            by.title,
            f"over {one.name}, all else equal{spread}.",
            {"": ablation_figure(one, figures.styles(runs))},
        )
        for one in ablations(runs, by)[:ABLATIONS]
    ]


def cost_slots(runs: Sequence[RunSummary]) -> list[Slot]:
    """Bytes and, where times were kept, seconds of a run."""
    slots = [
        Slot("bytes", "Bytes", "of a run; full colour down to the clients, pale up.", {"": figures.byte_bars(runs)})
    ]
    seconds = figures.second_bars(runs)
    if seconds.data:
        deviation = ", ± one standard deviation over seeds" if _seeds(runs) > 1 else ""
        caption = f"of a run, evaluation included{deviation}."
        slots.append(Slot("seconds", "Time", caption, {"": seconds}))
    return slots


def seed_slots(runs: Sequence[RunSummary]) -> list[Slot]:
    """The accuracy of each seed, where there are several."""
    if _seeds(runs) < 2:
        return []
    caption = "A dot a seed, a bar at their mean."
    return [Slot("seeds", "Final accuracy of each seed.", caption, {"": figures.accuracy_by_seed(runs)})]


def label_slot(runs: Sequence[RunSummary]) -> Slot | None:
    """Each label distribution that runs have: by their seeds, or by the runs where one seed has several (other partitions, other
    data); one figure where all share it."""
    different: list[RunSummary] = []
    for run in runs:
        if run.label_counts and all(run.label_counts != other.label_counts for other in different):
            different.append(run)
    if not different:
        return None
    by_seed = len({run.seed for run in different}) == len(different)
    seeds = _seeds(different) > 1
    known = {
        f"seed {run.seed}" if by_seed else f"{run.algorithm}, seed {run.seed}" if seeds else run.algorithm: run
        for run in different
    }
    first = different[0]
    clients = len(first.label_counts)
    shown = len(figures.shown_clients(clients))
    some = f" {shown} of the {clients:,} clients, evenly spaced." if shown < clients else ""
    samples = sum(map(sum, first.label_counts))
    variants = {
        name: figures.label_distribution(run.label_counts, run.class_names)
        for name, run in list(known.items())[:PARTITIONS]
    }
    total = f"; {samples:,} in all" if len({sum(map(sum, run.label_counts)) for run in different}) == 1 else ""
    wrong = (
        f" By the labels given, of which {_span(different)} are wrong."
        if any(r.wrong_labels for r in different)
        else ""
    )
    caption = f"Each bubble's area is the number of a client's training samples of a class{total}.{wrong}{some}"
    return Slot("labels", "Label distribution.", caption, variants, "labels")


def _span(runs: Sequence[RunSummary]) -> str:
    """How many wrong labels the runs have: `492`, or `0 to 492`."""
    least, most = (choose(run.wrong_labels for run in runs) for choose in (min, max))
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def recorded_slots(runs: Sequence[RunSummary]) -> list[Slot]:
    """What was recorded on request: of each method the first seed that has it."""
    found: dict[str, Slot] = {}
    for drawing in recorded.drawings(runs):
        if drawing.figure.data:
            name = _file_name(drawing.name)
            name = name if name not in found else f"{name}-{len(found)}"
            found[name] = Slot(name, drawing.title, drawing.caption, {"": drawing.figure})
    return list(found.values())


def _file_name(text: str) -> str:
    """A name for an element and for a file: letters, figures, dots, underscores, signs of equality and dashes."""
    return re.sub(r"[^\w.=]+", "-", text).strip("-")


def _seeds(runs: Sequence[RunSummary]) -> int:
    return max(len({run.seed for run in group}) for group in by_algorithm(runs).values())
