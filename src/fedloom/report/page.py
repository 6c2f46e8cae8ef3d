"""The report: one HTML page that holds all it needs, so that it opens from disk, on a phone and on paper.

What the page shows is put together here as plain values; `templates/` lays them out, `assets/` styles them and draws the figures.
Templates escape all text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from fedloom.errors import InvalidValue
from fedloom.objectives import Metric
from fedloom.report.cells import Table, score_cell, target_text
from fedloom.report.clients import client_caption, client_table, client_title
from fedloom.report.contents import effect_figures, report_figures, setting_curves
from fedloom.report.curves import AXES, POINTS
from fedloom.report.figures import ReportFigure, styles
from fedloom.report.sheet import (
    DIFFERENCE_HEADS,
    Criterion,
    Sheet,
    caption,
    difference_cells,
    difference_title,
    faults_in,
    overall,
    reading,
    spread_of,
)
from fedloom.report.sheet import sheet as sheet_of
from fedloom.report.summary import LAST, TO_TARGET, Row, RunSummary, Spread, TargetValue, dotted, faults
from fedloom.report.units import byte_text, percent, time_text
from fedloom.state.files import write_text

NO_BREAK = "\u00a0"

FAULTS = 60
"""Kinds of faults that are listed; more are counted."""

Tile = tuple[str, str, str]
"""Name, figure, and what it belongs to."""


@dataclass(frozen=True)
class ReportOptions:
    """What a page was written with, so that it can be written again."""

    title: str
    targets: tuple[TargetValue, ...] = ()
    command: str = ""
    last: int = LAST
    against: str = "best"
    measure: str = "last"

    @classmethod
    def of(cls, title: str, one: Sheet, command: str) -> ReportOptions:
        """Those of a page about the setting `one`, or of which it is the first."""
        targets = tuple(reach.target for reach in one.rows[0].reaches)
        return cls(title, targets, command, one.last, one.against, one.measure)

    @property
    def plain(self) -> dict[str, Any]:
        """As values for JSON."""
        return dataclasses.asdict(self)


def options_of(path: Path) -> ReportOptions | None:
    """The options of the report that lies there; None where there is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(r'<script type="application/json" id="about">(.*?)</script>', text, re.DOTALL)
    if found is None:
        return None
    known = json.loads(found[1])
    return ReportOptions(**{**known, "targets": tuple(known["targets"])})


def write_report(
    path: Path,
    title: str,
    runs: Sequence[RunSummary],
    targets: Sequence[TargetValue] | None = None,
    command: str = "",
    sheet: Sheet | None = None,
    first: str = "",
    by: Criterion | None = None,
) -> None:
    """Write the report of `runs` (one run, or methods x seeds on the same task) to `path`, atomically.

    `targets` are the accuracies in (0, 1], or limits such as `loss <= 0.2`, whose rounds and bytes the table shows,
    `command` the line that repeats the runs; by default those of the first run's configuration (`targets`, `command`). `sheet`
    is the comparison of these runs where it is known already (with its own targets). `first` is the section that the page
    begins with: `recorded`, `clients`, `curves`, `effects`, or the usual order. Effects of parameters and settings are shown
    in the sheet's measure, or `by` another criterion. Raises `InvalidValue` without runs, or for a target that is none
    (`Target.of`).
    """
    text = render(title, runs, targets, command, sheet, first, by)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def render(
    title: str,
    runs: Sequence[RunSummary],
    targets: Sequence[TargetValue] | None = None,
    command: str = "",
    sheet: Sheet | None = None,
    first: str = "",
    by: Criterion | None = None,
) -> str:
    """The page as text; see `write_report`."""
    if not runs:
        raise InvalidValue("a report needs at least one run")
    settings = runs[0].configuration
    if sheet is None:
        sheet = sheet_of(runs, list(settings.get("targets", ()) if targets is None else targets))
    found = report_figures(runs, by or sheet.criterion)
    options = ReportOptions.of(title, sheet, command or str(settings.get("command", "")))
    thinned = (
        f"Long curves are drawn with about {POINTS} of their points: the lowest and the highest of each of equal stretches. "
        "Tables use every round."
    )
    return _page(
        "report.html",
        options,
        runs,
        [figure for figures in found.values() for figure in figures],
        tiles=_result_tiles(runs, sheet),
        first=first,
        several=len(sheet.rows) > 1,
        table=_worth_showing(sheet.table),
        captions=[*_explained(sheet), *reading([sheet])],
        differences=sheet.tests[sheet.measure],
        difference_title=difference_title(sheet),
        difference_heads=DIFFERENCE_HEADS,
        difference_cells=partial(difference_cells, metric=sheet.criterion.metric),
        figures=found,
        axes={x: x.capitalize() + "s" * (x == "round") for x in AXES if any(x in f.variants for f in found["curves"])},
        thinned=thinned if max(len(run.records) for run in runs) > POINTS else "",
        label_choices={name: name for figure in found["clients"] for name in figure.variants},
        client_title=client_title(runs),
        client_table=client_table(runs),
        client_caption=client_caption(runs),
    )


def write_overview(
    path: Path,
    title: str,
    sheets: Sequence[Sheet],
    by_setting: Mapping[str, Sequence[RunSummary]],
    pages: Mapping[str, str],
    command: str,
) -> None:
    """Write the page over all settings to `path`, atomically.

    `sheets` are the settings, at least one, `by_setting` the runs of each by its label, `pages` the report of each likewise, as a
    path relative to the folder of `path`.
    """
    runs = [run for own in by_setting.values() for run in own]
    curves = setting_curves(by_setting)
    rows = [row for one in sheets for row in one.rows]
    counts = (("Settings", len(sheets)), ("Methods", len({row.algorithm for row in rows})))
    drawn = effect_figures(runs, sheets[0].criterion)
    shown = f"{_spread({row.seeds for row in rows})}{caption(sheets)}"
    text = _page(
        "overview.html",
        ReportOptions.of(title, sheets[0], command),
        runs,
        [*curves, *drawn],
        curves=curves,
        tiles=[*((name, str(count), "") for name, count in counts), *_cost_tiles(len(runs), rows)],
        table=overall(sheets),
        captions=[shown, *reading(sheets)],
        pages=[(one.setting, pages[one.setting], faults_in(one)) for one in sheets],
        figures=drawn,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


@cache
def templates() -> Environment:
    """The templates of all pages, which escape what they are given."""
    found = Environment(
        loader=PackageLoader("fedloom.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    found.globals |= {"asset": _asset}
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # in the order that is given
    found.filters |= {"breakable": _breakable, "nobreak": _unbroken, "lines": _lines}
    return found


def _page(
    template: str, options: ReportOptions, runs: Sequence[RunSummary], drawn: Sequence[ReportFigure], **more: Any
) -> str:
    return templates().get_template(template).render(
        options=options,
        lead=_lead(_common([run.configuration for run in runs])),
        unfinished=_unfinished(runs),
        notices=_notices(runs),
        looks=styles(runs),
        faults=_faults(runs),
        configuration=_facts([run.configuration for run in runs], {"algorithm", "seed", "command", "targets"}),
        environment=_facts([run.environment for run in runs], {"command"}),
        drawn={figure.name: {"choice": figure.choice, "variants": _plain(figure)} for figure in drawn},
        plotly=Markup(get_plotlyjs()),
        **more,
    )  # fmt: skip


def _asset(name: str) -> Markup:
    """A file of `assets/` as it is."""
    return Markup((files("fedloom.report") / "assets" / name).read_text(encoding="utf-8"))


def _breakable(text: str) -> Markup:
    """A key or a name that may be broken after its dots, underscores, brackets and equals signs, but in no number."""
    return Markup(re.sub(r"([_(=]|\.(?!\d))", r"\1<wbr>", str(escape(text))))


def _unbroken(text: str) -> str:
    """Text that is kept on one line."""
    return text.replace(" ", NO_BREAK)


def _lines(text: str) -> Markup:
    """A title with its line breaks, in which signs stay with their numbers."""
    return Markup("<br>").join(_with_signs(text).splitlines())


def _with_signs(text: str) -> str:
    """`80 %` and `≤ 0.2` on one line each."""
    return re.sub(r"([≤≥]) ", rf"\1{NO_BREAK}", text.replace(" %", f"{NO_BREAK}%"))


def _plain(figure: ReportFigure) -> dict[str, Any]:
    return {value: json.loads(variant.to_json()) for value, variant in figure.variants.items()}


def _result_tiles(runs: Sequence[RunSummary], one: Sheet) -> list[Tile]:
    """The best accuracies and the fewest rounds to each target of one setting, and what the runs took."""
    rows, several = one.rows, len(one.rows) > 1
    names = {"final": f"final {one.metric.noun}", "best": f"best {one.metric.noun}"}
    if several and one.measure != "rounds":  # which stand below
        names.setdefault(one.measure, one.criterion.name)
    tiles = []
    for measure, name in names.items():
        metric = one.criterion.metric if measure == one.measure else one.metric
        known = [(spread, row) for row in rows if (spread := spread_of(row, measure)) is not None]
        if known:
            sign = 1 if metric.higher_is_better else -1
            spread, row = max(known, key=lambda pair: sign * pair[0].mean)
            extreme = "Highest" if metric.higher_is_better else "Fewest" if measure in TO_TARGET else "Lowest"
            title = f"{extreme} {name}" if several else name[0].upper() + name[1:]
            tiles.append(
                (title, _score(spread, metric), _level(one, measure, row.algorithm, metric) if several else "")
            )
    for k, reach in enumerate(rows[0].reaches):
        whole = [(row.reaches[k].rounds, row) for row in rows if row.reaches[k].reached == row.seeds]
        if reached := [(spread, row) for spread, row in whole if spread is not None]:
            fewest = min((spread for spread, _ in reached), key=lambda spread: spread.mean)
            methods = [row.algorithm for spread, row in reached if spread.mean == fewest.mean]
            rounds = f"{fewest.mean:.1f}" if fewest.count > 1 else f"{fewest.mean:.0f}"
            title = _with_signs(f"Fewest rounds to {target_text(one.metric, reach.target)}")
            tiles.append((title, rounds, _listed(methods, 2, ", ") if several else ""))
    return tiles + _cost_tiles(len(runs), rows)


def _level(one: Sheet, measure: str, highest: str, metric: Metric) -> str:
    """The method with the best mean, and those that are not shown to differ from it."""
    word = "higher" if metric.higher_is_better else "lower"
    level = {"equal": "equal", "not significant": f"not significantly {word} than"}
    told = [highest]
    for verdict, text in level.items():
        methods = [d.method for d in one.tests[measure] if d.other == highest and d.verdict == verdict]
        told += [f"{text}: {_listed(methods, 2, ', ')}"] if methods else []
    return "; ".join(told)


def _cost_tiles(runs: int, rows: Sequence[Row]) -> list[Tile]:
    """What all runs sent and how long they took."""
    sent = sum(spread.mean * row.seeds for row in rows for spread in (row.bytes_down, row.bytes_up) if spread)
    tiles = [("Sent in all", byte_text(sent), "down and up")]
    if any(row.seconds for row in rows):
        total = sum(row.seconds.mean * row.seconds.count for row in rows if row.seconds)
        tiles.append(("Time in all", time_text(total), f"{runs} runs" if runs > 1 else ""))
    return tiles


def _score(spread: Spread, metric: Metric) -> str:
    return f"{score_cell(spread, metric).brief.replace('±', ' ± ')}{metric.unit}".replace(" ", NO_BREAK)


def _worth_showing(table: Table) -> Table:
    """The table without uninformative columns: seeds and rounds that all methods share, faults of none."""
    silent = {
        k
        for k, column in enumerate(table.columns)
        if (column.title in ("Seeds", "Rounds") and len({line[k].text for line in table.lines}) == 1)
        or (column.title == "Faults" and all(line[k].text == "0" for line in table.lines))
    }
    return table.part([k for k in range(len(table.columns)) if k not in silent])


def _spread(seeds: set[int]) -> str:
    counts = " to ".join(str(count) for count in sorted({min(seeds), max(seeds)}))
    return "" if seeds == {1} else f"Mean ± standard deviation over {counts} seeds. "


def _explained(one: Sheet) -> list[str]:
    """What the figures of the comparison are."""
    rows = one.rows
    found = [
        f"{_spread({row.seeds for row in rows})}{one.metric.title} on the test set: final after the last round, best of any "
        f"evaluation (selected on the test data), mean of the last {one.last} evaluations."
    ]
    if any(row.personal is not None for row in rows):
        found.append(
            f"Clients' own: {one.metric.noun} of each client's own model on its own test data, over all samples (where these "
            "models were not evaluated, of the global model); std over clients: standard deviation of the clients' figures, "
            "unweighted; worst tenth: mean over the tenth of the clients with the worst."
        )
    if rows[0].reaches:
        faster = f"; 2×: in half as many rounds as {rows[0].algorithm}" if len(rows) > 1 else ""
        found.append(
            f"Rounds, and bytes down and up, until the first evaluation that is as good as the target; * never reached{faster}."
        )
    if sentence := faults_in(one):
        found.append(f"{sentence[0].upper()}{sentence[1:]}.")
    return found


def _common(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys whose value all of these tables share."""
    first, *others = (dotted(table) for table in tables)
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _lead(shared: Mapping[str, Any]) -> list[str]:
    """The task in a few words, from the keys of the configuration that are there."""
    of_data = {key: shared.get(f"data.{key}", shared.get(key)) for key in ("partition", "clients")}
    share = shared.get("participation")
    found = [
        shared.get("data.name", shared.get("data")),
        of_data["partition"],
        None if of_data["clients"] is None else f"{of_data['clients']} clients",
        f"{percent(share)} % of them a round" if isinstance(share, int | float) else None,
        shared.get("model"),
        None if shared.get("rounds") is None else f"{shared['rounds']} rounds",
    ]
    return [str(text) for text in found if text is not None]


def _unfinished(runs: Sequence[RunSummary]) -> str:
    """A warning that names the runs with fewer rounds than they, or the others, should have; empty without any."""
    configured = [number for run in runs if isinstance(number := run.configuration.get("rounds"), int)]
    most = max([*configured, *(len(run.records) for run in runs)])
    alike = len(set(configured)) < 2
    short = [
        f"{run.algorithm} (seed {run.seed}: {len(run.records)})"
        for run in runs
        if len(run.records) < (most if alike else run.configuration.get("rounds", most))
    ]
    if not short:
        return ""
    return (
        f"Not all runs have {f'{most} rounds' if alike else 'all their rounds'}: {_listed(short, 8, ', ')}. "
        "The figures below are of the rounds they have; a mean curve ends where its shortest run ends."
    )


def _notices(runs: Sequence[RunSummary]) -> list[str]:
    """What runs had to say while they went on, each text once for all seeds of a method, with the rounds."""
    found: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for timing in run.timings:
            for text in timing.get("notices", ()):
                found.setdefault((run.algorithm, text), []).append(f"seed {run.seed} in round {timing['round']}")
    return [f"{method} ({_listed(rounds, 6, ', ')}): {text}" for (method, text), rounds in found.items()]


def _faults(runs: Sequence[RunSummary]) -> dict[str, Any]:
    """Lines of method, reason, times, clients and rounds, the most frequent first, and how many `others` are left out."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for run in runs:
        for number, client, reason in faults(run):
            found.setdefault((run.algorithm, reason), []).append((number, client))
    lines = []
    for (method, reason), cases in sorted(found.items(), key=lambda item: -len(item[1]))[:FAULTS]:
        clients = Counter(client for _, client in cases).most_common()
        names = [f"{client} ({times}×)" if times > 1 else str(client) for client, times in clients]
        first, last = min(cases)[0], max(cases)[0]
        span = str(first) if first == last else f"{first} to {last}"
        lines.append((method, reason, str(len(cases)), _listed(names, 6, ", "), span))
    return {"lines": lines, "others": max(0, len(found) - FAULTS)}


def _facts(tables: Sequence[Mapping[str, Any]], without: set[str]) -> dict[str, str]:
    """Every key that is set with its value, or its values where runs differ."""
    values: dict[str, dict[str, None]] = {}
    for table in tables:
        for key, value in dotted(table).items():
            if key not in without and value is not None:
                values.setdefault(key, {})[_text(value)] = None
    return {key: _listed(list(known), 5, "; ") for key, known in values.items()}


def _listed(texts: Sequence[str], most: int, between: str) -> str:
    more = f"{between.rstrip() if between == '; ' else ''} and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
