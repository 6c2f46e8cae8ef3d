"""The figures that runs have data for: the sections of a report, and the image files."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedloom.report import figures
from fedloom.report.ablation import ablation_figure, ablations
from fedloom.report.curves import AXES, learning_curves, measures, title_of
from fedloom.report.figures import ReportFigure, align
from fedloom.report.recorded import memorisation_figures, recorded_figures
from fedloom.report.sheet import Criterion, criterion
from fedloom.report.summary import RunSummary, by_algorithm
from fedloom.state.files import slug

LIMIT = {"curves": 8, "effects": 6, "labels": 6, "settings": 6}
"""Most figures of a kind: of further figures in the records, of parameters that differ between
runs, of label distributions, of settings by their curves.
"""


def report_figures(runs: Sequence[RunSummary], by: Criterion) -> dict[str, list[ReportFigure]]:
    """Return all figures with information by the section of the report that shows them.

    Args:
        runs: Runs of one task.
        by: The measure of the effects of parameters and settings.

    Returns:
        Figures by section: `result`, `effects`, `curves`, `clients` and `recorded`. A section may
        be empty.
    """
    sections = {
        "result": _seeds(runs),
        "effects": effect_figures(runs, by),
        "curves": _curves(runs),
        "clients": _labels(runs),
        "recorded": recorded_figures(runs),
    }
    return {
        name: [entry for entry in drawn if entry.informative] for name, drawn in sections.items()
    }


def image_figures(runs: Sequence[RunSummary], by: Criterion | None = None) -> list[ReportFigure]:
    """Return every figure that the runs have data for.

    Args:
        runs: Runs of one task.
        by: The measure of the effects; by default the mean accuracy of the last evaluations.

    Returns:
        The figures in the order of the report.
    """
    sections = report_figures(runs, by or criterion())
    return [figure for section in sections.values() for figure in section]


def effect_figures(runs: Sequence[RunSummary], by: Criterion) -> list[ReportFigure]:
    """Draw the criterion over every parameter or setting that differs between the runs.

    Args:
        runs: Runs that differ in a parameter or a setting.
        by: The measure to draw.

    Returns:
        A figure for each parameter, at most `LIMIT["effects"]`.
    """
    spread = ", mean over seeds ± one standard deviation" if _seed_count(runs) > 1 else ""
    looks = figures.styles(runs)
    return [
        ReportFigure.of(
            f"ablation-{name}",
            by.title,
            f"over {name}, all else equal{spread}.",
            ablation_figure(name, lines, by, looks),
        )
        for name, lines in list(ablations(runs, by).items())[: LIMIT["effects"]]
    ]


def setting_curves(by_setting: Mapping[str, Sequence[RunSummary]]) -> list[ReportFigure]:
    """Draw accuracy by round in each of the first settings, by its label; then the share of wrong
    labels that was learned.
    """
    shown = list(by_setting.items())[: LIMIT["settings"]]
    noisy = [(label, runs) for label, runs in shown if any(run.wrong_labels for run in runs)]
    panels = (
        [
            (label, figure)
            for label, runs in shown
            for figure in _curves(runs)[:1]
            if figure.informative
        ],
        [(label, figure) for label, runs in noisy for figure in memorisation_figures(runs)],
    )
    for curves in panels:
        for choice in AXES if curves else ():
            align([panel.variants[choice] for _, panel in curves if choice in panel.variants])
    return [
        replace(figure, name=slug(f"{label}-{figure.name}"), title=f"{label}: {figure.title}")
        for label, figure in itertools.chain(*panels)
    ]


def _seeds(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    if _seed_count(runs) < 2:
        return []
    title, drawn = f"Final {runs[0].metric.noun} of each seed.", figures.accuracy_by_seed(runs)
    return [ReportFigure.of("seeds", title, "A dot is a seed, the bar their mean.", drawn)]


def _curves(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    usual = measures(runs[0].metric)
    records = [record for run in runs for record in run.records]
    numbers = {
        key for record in records for key, value in record.items() if isinstance(value, float)
    }
    extra = sorted(numbers - usual.keys())[: LIMIT["curves"]]
    curves: list[ReportFigure] = []
    for measure, (title, caption) in (
        usual | {name: (title_of(name), "") for name in extra}
    ).items():
        if not any(measure in record for record in records):
            continue
        drawn = {x: learning_curves(runs, measure, x) for x in AXES}
        if variants := {x: figure for x, figure in drawn.items() if figure.data}:
            if not curves and _seed_count(runs) > 1:
                caption += figures.BAND
            name = f"curve-{measure}" if measure in usual else f"other-{measure}"
            curves.append(ReportFigure(slug(name), title, caption, variants, "x"))
    return curves


def _labels(runs: Sequence[RunSummary]) -> list[ReportFigure]:
    """Draw each label distribution: by seed, or by run where a seed has several (different
    partitions, different data).
    """
    different: list[RunSummary] = []
    for run in runs:
        labelled = run.label_counts and len(run.label_counts[0]) > 1
        if labelled and run.label_counts not in [distinct.label_counts for distinct in different]:
            different.append(run)
    if not different:
        return []
    by_seed = len({run.seed for run in different}) == len(different)
    variants = {
        f"seed {run.seed}"
        if by_seed
        else f"{run.algorithm}, seed {run.seed}": figures.label_distribution(
            run.label_counts, run.class_names, client_names=run.client_names
        )
        for run in different[: LIMIT["labels"]]
    }
    totals = [sum(map(sum, run.label_counts)) for run in different]
    total = f"; {totals[0]:,} in all" if len(set(totals)) == 1 else ""
    clients = len(different[0].label_counts)
    shown = len(figures.evenly_spaced(clients))
    some = f" {shown} of the {clients:,} clients, evenly spaced." if shown < clients else ""
    wrong = sorted({run.wrong_labels for run in different})
    span = f"{wrong[0]:,}" if len(wrong) == 1 else f"{wrong[0]:,} to {wrong[-1]:,}"
    labels = f" By the labels given, of which {span} are wrong." if wrong[-1] else ""
    caption = (
        "Each bubble's area is the number of a client's training samples of a "
        f"class{total}.{labels}{some}"
    )
    return [ReportFigure("labels", "Label distribution.", caption, variants, "labels")]


def _seed_count(runs: Sequence[RunSummary]) -> int:
    return max(len({run.seed for run in group}) for group in by_algorithm(runs).values())
