"""The report: one HTML page that holds all it needs, so that it opens from disk, on a phone and on
paper.

This module computes the contents as plain values; `templates/` lays them out, `assets/` styles them
and draws the figures. Templates escape all text.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedloom.common.errors import InvalidValue, listed
from fedloom.report.cells import score_cell, target_text
from fedloom.report.clients import client_table
from fedloom.report.conclusions import conclusions
from fedloom.report.contents import effect_figures, report_figures, setting_curves
from fedloom.report.curves import AXES, POINTS
from fedloom.report.figures import ReportFigure, plotly_script, styles
from fedloom.report.layouts import NO_BREAK, templates, with_signs
from fedloom.report.method_settings import settings_table, tuning_notes
from fedloom.report.sheet import (
    Criterion,
    ReportOptions,
    Sheet,
    caption,
    explained,
    faults_in,
    overall,
    reading,
)
from fedloom.report.summary import (
    RunSummary,
    TargetValue,
    bytes_down,
    bytes_up,
    dotted,
    elapsed_seconds,
    faults,
    seconds,
    target_key,
)
from fedloom.report.units import byte_text, percent, time_text
from fedloom.state.files import write_text

FAULTS = 60  # kinds of faults that are listed; more are counted

PRIVATE = (
    "its epsilon counts on amplification by sampling, which publishing who took part in which "
    "round voids: keep to yourself "
    "metrics.jsonl and clients.jsonl, which name the participants, and the table of clients "
    "that dropped out below."
)
"""Follows the name of a method that amplifies its privacy by sampling the clients of a round."""

Tile = tuple[str, str, str]
"""Name, figure, and a small text below it."""


def write_page(path: Path, page: str) -> None:
    """Write a page to `path`, atomically.

    Args:
        path: The file. Missing folders are made, and an existing file is replaced.
        page: The HTML.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)


def render(
    title: str,
    runs: Sequence[RunSummary],
    targets: Sequence[TargetValue] | None = None,
    command: str = "",
    sheet: Sheet | None = None,
    opening: str = "",
    by: Criterion | None = None,
) -> str:
    """Return the report of runs (at least one, or methods x seeds on the same task) as a page.

    Args:
        title: Title of the page.
        runs: The runs, at least one.
        targets: Targets to reach; by default the targets in the configuration of `runs[0]`. Ignored
            with a sheet.
        command: The command that repeats the runs; by default from the same configuration.
        sheet: The comparison of the runs; by default it is made from them.
        opening: Section with which the page begins: `recorded`, `clients`, `curves` or `effects`.
        by: The measure of the effects of parameters and settings; by default the sheet's measure.

    Returns:
        HTML without links to other files.

    Raises:
        InvalidValue: There is no run.
    """
    if not runs:
        raise InvalidValue("a report needs at least one run")
    settings = runs[0].configuration
    sheet = sheet or usual_sheet(runs, targets)
    sections = report_figures(runs, by or sheet.criterion)
    axes = [x for x in AXES if any(x in figure.variants for figure in sections["curves"])]
    return _page(
        "report.html",
        ReportOptions.of(title, sheet, command or str(settings.get("command", ""))),
        runs,
        [figure for figures in sections.values() for figure in figures],
        tiles=_result_tiles(runs, sheet),
        opening=opening,
        several=len(sheet.rows) > 1,
        conclusions=conclusions([sheet]),
        tables=sheet.halves(),
        settings=settings_table(sheet),
        faults_in=_sentence(faults_in(sheet)),
        compared=_compared(runs, sheet),
        tuning=tuning_notes([sheet]),
        notes=[*explained([sheet]), *reading([sheet])],
        differences=sheet.differences,
        figures=sections,
        axes={x: x.capitalize() + "s" * (x == "round") for x in axes},
        thinned=POINTS if max(len(run.records) for run in runs) > POINTS else 0,
        label_choices={name: name for figure in sections["clients"] for name in figure.variants},
        clients=client_table(runs),
    )


def usual_sheet(runs: Sequence[RunSummary], targets: Sequence[TargetValue] | None = None) -> Sheet:
    """Return the sheet of runs, with the usual targets and measure.

    Args:
        runs: At least one run.
        targets: Targets to reach; by default the targets in the configuration of `runs[0]`.

    Returns:
        The sheet. Its measure is `personal` if the clients' own models were evaluated, else `last`.
    """
    settings = runs[0].configuration
    personal = settings.get("personal_every") and any(run.clients for run in runs)
    limits = list(settings.get("targets", ()) if targets is None else targets)
    return Sheet(runs, limits, measure="personal" if personal else "last")


def render_overview(
    title: str,
    sheets: Sequence[Sheet],
    by_setting: Mapping[str, Sequence[RunSummary]],
    pages: Mapping[str, str],
    command: str,
) -> str:
    """Return the page over all settings.

    Args:
        title: Title of the page.
        sheets: The comparison of each setting, at least one.
        by_setting: Runs by the label of their setting.
        pages: Relative path of the report of each setting, by its label.
        command: The command that repeats the runs; "" for none.

    Returns:
        HTML with links to the pages.
    """
    runs = [run for group in by_setting.values() for run in group]
    curves = setting_curves(by_setting)
    counts = {"Settings": len(sheets), "Methods": len({run.algorithm for run in runs})}
    drawn = effect_figures(runs, sheets[0].criterion)
    return _page(
        "overview.html",
        ReportOptions.of(title, sheets[0], command),
        runs,
        [*curves, *drawn],
        curves=curves,
        conclusions=conclusions(sheets),
        tiles=[
            *((name, str(count), "") for name, count in counts.items()),
            *_cost_tiles(runs),
        ],
        table=overall(sheets),
        caption=caption(sheets),
        notes=[*explained(sheets), *tuning_notes(sheets), *reading(sheets)],
        pages=[(sheet.setting, pages[sheet.setting], faults_in(sheet)) for sheet in sheets],
        figures=drawn,
    )


def _page(
    template: str,
    options: ReportOptions,
    runs: Sequence[RunSummary],
    drawn: Sequence[ReportFigure],
    **contents: Any,
) -> str:
    return rendered(
        template,
        drawn,
        title=options.title,
        options=dataclasses.asdict(options),
        lead=_lead([dotted(run.configuration) for run in runs]),
        unfinished=_unfinished(runs),
        notices=_notices(runs),
        looks=styles(runs),
        faults=_faults(runs),
        configuration=_facts(
            [run.configuration for run in runs], {"algorithm", "seed", "command", "targets"}
        ),
        environment=_facts([run.environment for run in runs], {"command"}),
        **contents,
    )  # fmt: skip


def rendered(template: str, drawn: Sequence[ReportFigure], **contents: Any) -> str:
    """Return a page from its template; its scripts draw the figures.

    Args:
        template: Name of a file in `report/templates`.
        drawn: Figures of the page.
        **contents: Variables of the template.

    Returns:
        HTML that contains Plotly and loads no other file.
    """
    slots = {
        figure.name: {"choice": figure.choice, "variants": _variants(figure)} for figure in drawn
    }
    plotly = Markup(plotly_script(drawn))
    return templates().get_template(template).render(drawn=slots, plotly=plotly, **contents)


def _variants(figure: ReportFigure) -> dict[str, Any]:
    """Return the drawings by the value of the choice; variants with the same kinds of traces as the
    first one, such as curves over bytes, hold only values that differ.
    """
    variants = {value: json.loads(each.to_json()) for value, each in figure.variants.items()}
    first, *others = variants.values()
    for other in others:
        pairs = list(zip(first["data"], other["data"], strict=False))
        alike = all(trace.keys() == base.keys() for base, trace in pairs)
        if alike and len(first["data"]) == len(other["data"]):
            other["changes"] = [
                {key: value for key, value in trace.items() if value != base[key]}
                for base, trace in pairs
            ]
            del other["data"]
    return variants


def _result_tiles(runs: Sequence[RunSummary], sheet: Sheet) -> list[Tile]:
    rows, metric = sheet.rows, sheet.metric
    tiles = []
    for name in ("final", "best") if len(rows) == 1 else ():
        if (spread := rows[name].iloc[0]) is not None:
            score = f"{score_cell(spread, metric).text}{metric.unit}"
            tiles.append((f"{name.capitalize()} {metric.noun}", score.replace(" ", NO_BREAK), ""))
    for target in sheet.targets:
        key = target_key(target)
        complete = rows[rows[f"reached_{key}"] == rows["seeds"]]
        rounds = complete[f"rounds_to_{key}"]
        if len(rounds):
            fewest = min(rounds, key=lambda spread: spread.mean)
            methods = [method for method, spread in rounds.items() if spread.mean == fewest.mean]
            number = f"{fewest.mean:.1f}" if fewest.count > 1 else f"{fewest.mean:.0f}"
            title = with_signs(f"Fewest rounds to {target_text(metric, target)}")
            tiles.append((title, number, listed(methods, 2) if len(rows) > 1 else ""))
    return tiles + _cost_tiles(runs)


def _cost_tiles(runs: Sequence[RunSummary]) -> list[Tile]:
    """Return the bytes of all runs and their time: by the clock on the wall, and summed over
    them.
    """
    sent = sum(bytes_down(run) + bytes_up(run) for run in runs)
    tiles = [("Sent in all", byte_text(sent), "down and up")]
    times = [time for run in runs if (time := seconds(run)) is not None]
    if times:
        total, elapsed = time_text(sum(times)), elapsed_seconds(runs)
        summed = "summed" if elapsed is None else f"{total} one after another"
        more = f"{len(runs)} runs, {summed}" if len(runs) > 1 else ""
        tiles.append(("Time", total if elapsed is None else time_text(elapsed), more))
    return tiles


def _sentence(text: str) -> str:
    return text and f"{text[0].upper()}{text[1:]}."


def _lead(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    reference = configurations[0]
    shared = {
        key: value
        for key, value in reference.items()
        if all(run.get(key) == value for run in configurations)
    }
    clients, share = shared.get("data.clients", shared.get("clients")), shared.get("participation")
    words = [
        shared.get("data.name", shared.get("data")),
        shared.get("data.partition", shared.get("partition")),
        clients and f"{clients} clients",
        f"{percent(share)} % of them a round" if isinstance(share, int | float) else None,
        shared.get("model"),
        f"{shared['rounds']} rounds" if "rounds" in shared else None,
    ]
    return [str(word) for word in words if word]


def _unfinished(runs: Sequence[RunSummary]) -> str:
    most = max(len(run.records) for run in runs)
    short = [
        f"{run.algorithm} (seed {run.seed}: {len(run.records)} of "
        f"{run.configuration.get('rounds', most)})"
        for run in runs
        if len(run.records) < run.configuration.get("rounds", most)
    ]
    warning = (
        "The figures below are of the rounds they have; a mean curve ends where its "
        "shortest run ends."
    )
    return f"Not all runs have all their rounds: {listed(short, 8)}. {warning}" if short else ""


def _compared(runs: Sequence[RunSummary], sheet: Sheet) -> str:
    """Return the limit of a table that leaves out runs or rounds; empty for all runs."""
    if len(sheet.runs) < len(runs):
        return "Tables and tests leave out the runs that have not all their rounds."
    rounds = {len(run.records) for run in sheet.runs}
    if max(len(run.records) for run in runs) > max(rounds):
        return f"Tables and tests compare the first {max(rounds)} rounds, which all runs have."
    return ""


def _notices(runs: Sequence[RunSummary]) -> list[str]:
    """Return the runs' notices, each text once for all seeds of a method, with the rounds, and the
    limits of their privacy.
    """
    rounds: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for timing in run.timings:
            for text in timing.get("notices", ()):
                rounds.setdefault((run.algorithm, text), []).append(
                    f"seed {run.seed} in round {timing['round']}"
                )
    notices = [
        f"{method} ({listed(numbers, 6)}): {text}" for (method, text), numbers in rounds.items()
    ]
    private = [
        run.algorithm
        for run in runs
        if re.search(r"\bprivate\(", str(run.configuration.get("algorithm", "")))
    ]
    return notices + [f"{method}: {PRIVATE}" for method in dict.fromkeys(private)]


def _faults(runs: Sequence[RunSummary]) -> dict[str, Any]:
    """Return `lines` of method, reason, times, clients and rounds, the most frequent first, and the
    number of the `unlisted`.
    """
    by_reason: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for run in runs:
        for number, client, reason in faults(run):
            by_reason.setdefault((run.algorithm, reason), []).append(
                (number, run.client_name(client))
            )
    frequent = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    lines = []
    for cause, cases in frequent[:FAULTS]:
        rounds, clients = zip(*cases, strict=True)
        names = [
            f"{client} ({times}×)" if times > 1 else client
            for client, times in Counter(clients).most_common()
        ]
        span = " to ".join(map(str, sorted({min(rounds), max(rounds)})))
        lines.append((*cause, str(len(cases)), listed(names, 6), span))
    return {"lines": lines, "unlisted": len(frequent[FAULTS:])}


def _facts(tables: Sequence[Mapping[str, Any]], without: set[str]) -> dict[str, str]:
    """Return every key that is set with its value, or its values where runs differ."""
    values: dict[str, dict[str, None]] = {}
    for table in tables:
        for key, value in dotted(table).items():
            if key not in without and value is not None:
                values.setdefault(key, {})[_text(value)] = None
    return {key: listed(list(texts), 5, "; ") for key, texts in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
