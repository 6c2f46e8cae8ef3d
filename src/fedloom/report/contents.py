"""Which figures runs have data for: the sections of a report, and the image files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import plotly.graph_objects as go

from fedloom.report import figures
from fedloom.report.ablation import ablation_figure, ablations
from fedloom.report.curves import AXES, learning_curves, measures, title_of
from fedloom.report.figures import ReportFigure
from fedloom.report.recorded import joint_landscapes, memorisation_figures, recorded_figures
from fedloom.report.sheet import Criterion, criterion
from fedloom.report.summary import RunSummary, by_algorithm
from fedloom.state.files import slug

LIMIT = {"curves": 8, "effects": 6, "labels": 6, "settings": 6}
"""How many of a kind are drawn: of further figures in the records, of parameters that differ between runs, of label
distributions, of settings by their curves."""


def report_figures(runs: Sequence[RunSummary], by: Criterion) -> dict[str, list[ReportFigure]]:
    """All figures by the section of the report that shows them; `effects` are judged `by` a criterion."""
    return {
        "result": _seeds(runs),
        "effects": effect_figures(runs, by),
        "curves": _curves(runs),
        "costs": _costs(runs),
        "clients": _labels(runs),
        "recorded": _recorded(runs),
    }


def image_figures(runs: Sequence[RunSummary], by: Criterion | None = None) -> list[ReportFigure]:
    """Every figure that the runs, judged `by` a criterion (None: the usual one), have data for; landscapes of several methods
    also side by side in one."""
    sections = report_figures(runs, by or criterion())
    return [*(figure for found in sections.values() for figure in found), *joint_landscapes(runs)]


def effect_figures(runs: Sequence[RunSummary], by: Criterion) -> list[ReportFigure]:
    """The criterion over every parameter or setting that differs between the runs."""
    spread = ", mean over seeds ± one standard deviation" if _seed_count(runs) > 1 else ""
    looks = figures.styles(runs)
    return [
        _figure(
            f"ablation-{one.name}", by.title, f"over {one.name}, all else equal{spread}.", ablation_figure(one, looks)
        )
        for one in ablations(runs, by)[: LIMIT["effects"]]
    ]


def setting_curves(by_setting: Mapping[str, Sequence[RunSummary]]) -> list[ReportFigure]:
    """Accuracy by round in each of the first settings, by its label; then what was learned of wrong labels, if there are any."""
    shown = list(by_setting.items())[: LIMIT["settings"]]
    curves = [(label, one) for label, runs in shown for one in _curves(runs)[:1]]
    wrong = [(label, runs) for label, runs in shown if any(run.wrong_labels for run in runs)]
    curves += [(label, one) for label, runs in wrong for one in memorisation_figures(runs)]
    return [replace(one, name=slug(f"{label}-{one.name}"), title=f"{label}: {one.title}") for label, one in curves]


def _figure(name: str, title: str, caption: str, figure: go.Figure) -> ReportFigure:
    return ReportFigure(slug(name), title, caption, {"": figure})


def _seeds(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """The accuracy of each seed, where there are several."""
    if _seed_count(runs) < 2:
        return []
    drawn = figures.accuracy_by_seed(runs)
    return [
        _figure("seeds", f"Final {runs[0].metric.noun} of each seed.", "A dot is a seed, the bar their mean.", drawn)
    ]


def _curves(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """Learning curves of all that was recorded, over each axis that the runs have figures for."""
    known = measures(runs[0].metric)
    others = {
        name: (title_of(name), "as recorded.")
        for name in _recorded_numbers(runs)[: LIMIT["curves"]]
    }  # fmt: skip
    found = []
    for measure, (title, caption) in {**known, **others}.items():
        name = f"curve-{measure}" if measure in known else f"other-{measure}"
        drawn = {
            x: learning_curves(runs, measure, x) for x in AXES if any(measure in r for run in runs for r in run.records)
        }
        if variants := {x: figure for x, figure in drawn.items() if figure.data}:
            found.append(ReportFigure(slug(name), title, caption, variants, "x"))
    if found and _seed_count(runs) > 1:
        found[0] = replace(found[0], caption=f"{found[0].caption} Mean over seeds, band ± one standard deviation.")
    return found


def _recorded_numbers(runs: Sequence[RunSummary]) -> list[str]:
    """The names of further numbers in the records."""
    lines, known = [record for run in runs for record in run.records], measures(runs[0].metric)
    return sorted(
        {key for line in lines for key, value in line.items() if isinstance(value, float) and key not in known}
    )


def _costs(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """Bytes and, where times were kept, seconds of a run."""
    caption = "of a run; full colour down to the clients, pale up."
    found = [_figure("bytes", "Bytes", caption, figures.byte_bars(runs))]
    seconds = figures.second_bars(runs)
    if seconds.data:
        deviation = ", ± one standard deviation over seeds" if _seed_count(runs) > 1 else ""
        found.append(_figure("seconds", "Time", f"of a run, evaluation included{deviation}.", seconds))
    return found


def _labels(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """Each label distribution that runs have: by seed, or by run where one seed has several (other partitions, other data)."""
    different: list[RunSummary] = []
    for run in runs:
        if (
            run.label_counts
            and len(run.label_counts[0]) > 1
            and all(run.label_counts != other.label_counts for other in different)
        ):
            different.append(run)
    if not different:
        return []
    by_seed = len({run.seed for run in different}) == len(different)
    several = _seed_count(different) > 1
    variants = {
        f"seed {run.seed}" if by_seed else f"{run.algorithm}, seed {run.seed}" if several else run.algorithm:
            figures.label_distribution(run.label_counts, run.class_names)
        for run in different[: LIMIT["labels"]]
    }  # fmt: skip
    totals = [sum(map(sum, run.label_counts)) for run in different]
    total = f"; {totals[0]:,} in all" if len(set(totals)) == 1 else ""
    clients = len(different[0].label_counts)
    shown = len(figures.shown_clients(clients))
    some = f" {shown} of the {clients:,} clients, evenly spaced." if shown < clients else ""
    wrong = sorted({run.wrong_labels for run in different})
    span = f"{wrong[0]:,}" if len(wrong) == 1 else f"{wrong[0]:,} to {wrong[-1]:,}"
    given = f" By the labels given, of which {span} are wrong." if wrong[-1] else ""
    caption = f"Each bubble's area is the number of a client's training samples of a class{total}.{given}{some}"
    return [ReportFigure("labels", "Label distribution.", caption, variants, "labels")]


def _recorded(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """What was recorded on request, under names that differ."""
    found: dict[str, ReportFigure] = {}
    for figure in recorded_figures(runs):
        if figure.variants[""].data:
            name = slug(figure.name)
            name = name if name not in found else f"{name}-{len(found)}"
            found[name] = replace(figure, name=name)
    return list(found.values())


def _seed_count(runs: Sequence[RunSummary]) -> int:
    return max(len({run.seed for run in group}) for group in by_algorithm(runs).values())
