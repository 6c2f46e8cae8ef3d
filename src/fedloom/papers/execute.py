"""The runs of a plan, and the files that they leave: CSV, Markdown, LaTeX and the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from fedloom.config.expression import parse
from fedloom.errors import DataError, InvalidValue
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.events import RunName, Watch
from fedloom.experiment.identity import environment
from fedloom.experiment.jobs import Job, Tasks, require_possible
from fedloom.experiment.pools import make_pool
from fedloom.papers.ledger import ExhibitRecord, today
from fedloom.papers.measure import judged, measured
from fedloom.papers.paper_data import at_hand, data_of, facts, family
from fedloom.papers.plan import ReproducePlan, setting_key
from fedloom.papers.protocols import Baseline, PaperCell
from fedloom.papers.result_table import CellResult, to_csv, to_latex, to_markdown
from fedloom.report.page import write_report
from fedloom.report.summary import RunSummary
from fedloom.state.files import write_text
from fedloom.task import make_dataset


def waiting(plan: ReproducePlan, fresh: bool) -> list[Job]:
    """The runs that are not finished yet."""
    return [job for job in plan.jobs if fresh or not job.finished]


def require_data(plan: ReproducePlan, fresh: bool) -> Tasks:
    """Read the data and set up every method once in every setting, before the first round of any run.

    Raises `DataError`, in one line, that says which data are missing, where to put them and which option to give.
    """
    tasks = Tasks()
    for job in {job.name.setting: job for job in waiting(plan, fresh)}.values():
        try:
            require_possible([job], tasks)
        except (DataError, InvalidValue) as error:
            raise _located(error, job, plan) from None
    return tasks


def require_files(plan: ReproducePlan, fresh: bool) -> None:
    """As `require_data`, but only where not even a file of the data is found: so that this is said at once."""
    for job in {job.name.setting: job for job in waiting(plan, fresh)}.values():
        name = data_of(job.configuration.data.name)
        if name in facts() and not at_hand(name, plan.options.folders.get(family(name))):
            try:
                make_dataset(job.configuration.data.name)
            except (DataError, InvalidValue) as error:
                raise _located(error, job, plan) from None


def _located(error: DataError | InvalidValue, job: Job, plan: ReproducePlan) -> DataError | InvalidValue:
    """The error with what the user can do about missing data here."""
    name = data_of(job.configuration.data.name)
    text = str(error).removeprefix(f"settings, {job.name.setting}: ")
    if name not in facts() or facts()[name].generated or not any(word in text for word in ("put ", "no such folder")):
        return InvalidValue(f"{job.name.setting}: {text}")
    others = {parse(cell.setting.data).name for cell in plan.exhibit.cells} - {name}
    instead = "; or choose other --columns" if others else ""
    return DataError(f"{text}; here: --data {family(name)}=FOLDER{instead}")


def execute(
    plan: ReproducePlan,
    configuration: Configuration,
    watch: Watch,
    tasks: Tasks,
    *,
    fresh: bool,
    stopped: Callable[[], bool],
) -> dict[RunName, str]:
    """Make the runs that are not finished; what went wrong, by run. A run that fails does not keep the others from running.

    The `configuration` says how many go on at a time, with how many threads.
    """
    jobs = waiting(plan, fresh)
    with closing(make_pool(configuration, len(plan.jobs), len(jobs), tasks)) as pool:
        return pool.run(jobs, watch, fresh, stopped)


def lines(plan: ReproducePlan, failed: Mapping[RunName, str]) -> list[CellResult]:
    """Every chosen cell with what its runs gave, as far as they are finished."""
    summaries = summaries_of(plan)
    result = []
    for cell in plan.cells:
        own, others = plan.jobs_of(cell), plan.jobs_of(cell.baseline) if cell.baseline else []
        jobs = list({job.name: job for job in (*own, *others)}.values())
        reason = next((failed[job.name] for job in jobs if job.name in failed), "")
        runs, base = ([summaries[job.name] for job in some if job.name in summaries] for some in (own, others))
        finished = sum(job.name in summaries for job in jobs)
        short = (f"{finished} of {len(jobs)} runs",) if finished < len(jobs) else ()
        left_out = (*plan.partial[setting_key(cell.setting)], *short)
        result.append(CellResult(cell, measured(cell, runs, base), left_out, reason))
    return result


def summaries_of(plan: ReproducePlan) -> dict[RunName, RunSummary]:
    """The figures of the finished runs."""
    return {job.name: job.summary() for job in plan.jobs if job.finished}


def title(plan: ReproducePlan) -> str:
    """`PARTIAL fedumf.table-a2: rounds to one accuracy a data set`."""
    words = f"{plan.exhibit.id}: {plan.exhibit.shows}"
    return f"{plan.label} {words}" if plan.label else words


def notes(plan: ReproducePlan) -> list[str]:
    """What a reader of the table must know."""
    found = [f"{plan.label}: {reason}" for reason in plan.reasons]
    if len(plan.cells) < len(plan.exhibit.cells):
        found.append(f"{len(plan.cells)} of {len(plan.exhibit.cells)} cells")
    if any(cell.measure.kind in ("rounds", "speedup") for cell in plan.cells):
        found.append("*: never reached")
    if any(cell.measure.kind == "end" for cell in plan.cells):
        found.append("mean ± std of the last 10 evaluations of a run")
    return found


def write(plan: ReproducePlan, table: list[CellResult], command: str) -> list[Path]:
    """Write `cells.csv`, `.md` and `.tex`, the record `cells.json` and, where there are runs, `report.html`; their paths."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    places = [plan.folder / name for name in ("cells.csv", "cells.md", "cells.json", "cells.tex")]
    write_text(places[0], to_csv(plan.exhibit.id, table))
    write_text(places[1], to_markdown(title(plan), table, notes(plan)))
    write_text(places[3], to_latex(plan.exhibit.id, title(plan), table, notes(plan)))
    runs = _labelled(plan)
    computed_with = runs[0].environment if runs else environment()
    write_text(places[2], ExhibitRecord(plan.exhibit.id, command, today(), computed_with, tuple(table)).to_json())
    if runs:
        places.append(plan.folder / "report.html")
        targets = sorted({cell.measure.target / 100 for cell in plan.cells if cell.measure.target})
        left_out = f" ({'; '.join(plan.reasons)})" if plan.reasons else ""
        write_report(
            places[-1], title(plan) + left_out, runs, targets, command, first=_first(plan), by=judged(plan.cells)
        )
    return places


def _first(plan: ReproducePlan) -> str:
    """The section of the report that the figure is in, so that the page begins with it; the usual order for tables."""
    if any(cell.measure.kind == "classes" for cell in plan.cells):
        return "clients"
    return "recorded" if any(cell.setting.record for cell in plan.cells) else ""


def _labelled(plan: ReproducePlan) -> list[RunSummary]:
    """The finished runs under the paper's names, with their setting where there are several."""
    first: dict[tuple[str, str], PaperCell | Baseline] = {}
    baselines = [cell.baseline for cell in plan.cells if cell.baseline]
    places: list[PaperCell | Baseline] = [*plan.cells, *baselines]
    for place in places:
        first.setdefault((setting_key(place.setting), str(parse(place.algorithm))), place)
    several = len({cell.setting.name for cell in plan.cells}) > 1
    result = []
    for name, run in summaries_of(plan).items():
        place = first[name.setting, name.algorithm]
        label = f"{place.row}, {place.setting.name}" if several else place.row
        result.append(dataclasses.replace(run, algorithm=label))
    return result
