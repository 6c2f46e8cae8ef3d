"""The data that a plan needs, and the files that its runs leave: CSV, JSON and the report."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedloom.common.errors import InvalidValue
from fedloom.report.page import render, write_page
from fedloom.report.summary import RunSummary
from fedloom.reviews.papers.exhibit_record import ExhibitRecord, today
from fedloom.reviews.papers.measure import judged, measured
from fedloom.reviews.papers.paper_data import FACTS, at_hand, data_of, family
from fedloom.reviews.papers.plan import ReproducePlan
from fedloom.reviews.papers.result_table import CellResult, to_csv
from fedloom.runs.directory import write_json
from fedloom.runs.events import RunName
from fedloom.runs.identity import environment
from fedloom.state.files import write_text
from fedloom.study.jobs import Tasks, require_possible


def require_data(plan: ReproducePlan, fresh: bool) -> Tasks:
    """Read the data and set up a method in every setting, before the first round of any run.

    Args:
        plan: The runs of the table.
        fresh: Check the finished runs too.

    Returns:
        The tasks, for the runs that follow.

    Raises:
        InvalidValue: Data are missing. The text names them, their folder and the option to give.
    """
    tasks = Tasks()
    for job in {job.name.setting: job for job in plan.waiting(fresh)}.values():
        try:
            require_possible([job], tasks)
        except InvalidValue as error:
            name = data_of(job.configuration.data.name)
            missing = name in FACTS and not at_hand(name, plan.options.folders.get(family(name)))
            remedy = (
                f"; here: --data {family(name)}=FOLDER, or choose other --columns"
                if missing
                else ""
            )
            raise InvalidValue(f"{error}{remedy}") from None
    return tasks


def lines(
    plan: ReproducePlan, summaries: Mapping[RunName, RunSummary], failed: Mapping[RunName, str]
) -> list[CellResult]:
    """Return every chosen cell with the figures of its finished runs.

    Args:
        plan: The runs of the table.
        summaries: Finished runs by name.
        failed: Reasons of failed runs by name.

    Returns:
        A result for each chosen cell, in the order of the table; its value is None without a run.
    """
    results = []
    for cell in plan.cells:
        jobs = plan.jobs_of(cell)
        baseline = plan.jobs_of(cell.baseline) if cell.baseline else []
        needed = list(dict.fromkeys(job.name for job in (*jobs, *baseline)))
        reason = next((failed[name] for name in needed if name in failed), "")
        runs, base = (
            [summaries[job.name] for job in group if job.name in summaries]
            for group in (jobs, baseline)
        )
        finished = sum(name in summaries for name in needed)
        short = (f"{finished} of {len(needed)} runs",) if finished < len(needed) else ()
        left_out = (*plan.partial[cell.setting.key], *short)
        results.append(CellResult(cell, measured(cell, runs, base), left_out, reason))
    return results


def title(plan: ReproducePlan) -> str:
    """Return a title such as `PARTIAL fedumf.table-a2: rounds to one accuracy a data set`."""
    return f"{'PARTIAL ' if plan.reasons else ''}{plan.exhibit.id}: {plan.exhibit.shows}"


def notes(plan: ReproducePlan) -> list[str]:
    """Return notes for readers of the table."""
    texts = [f"PARTIAL: {reason}" for reason in plan.reasons]
    if len(plan.cells) < len(plan.exhibit.cells):
        texts.append(f"{len(plan.cells)} of {len(plan.exhibit.cells)} cells")
    if any(cell.measure.target is not None for cell in plan.cells):
        texts.append("*: never reached")
    if any(cell.measure.kind == "end" for cell in plan.cells):
        texts.append("mean ± std of the last 10 evaluations of a run")
    return texts


def write(
    plan: ReproducePlan,
    table: list[CellResult],
    summaries: Mapping[RunName, RunSummary],
    command: str,
) -> list[Path]:
    """Write `cells.csv`, the record `cells.json` and, where there are runs, `report.html`.

    `comparison.json` lists the runs, for other commands that take a folder.

    Args:
        plan: The runs of the table, with their folder.
        table: Results of the cells.
        summaries: Finished runs by name.
        command: The command that makes the table again.

    Returns:
        The written files. The last is the page to open first.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    runs = _labelled(plan, summaries)
    computed_with = runs[0].environment if runs else environment()
    texts = {
        "cells.csv": to_csv(plan.exhibit.id, table),
        "cells.json": ExhibitRecord(
            plan.exhibit.id, command, today(), computed_with, tuple(table)
        ).to_json(),
    }
    for name, text in texts.items():
        write_text(plan.folder / name, text)
    jobs = [job for job in plan.jobs if job.name in summaries]
    listed = [
        {**job.name._asdict(), "setting": {"column": job.name.setting}, "directory": str(job.path)}
        for job in jobs
    ]
    write_json(plan.folder / "comparison.json", {"runs": listed})
    paths = [plan.folder / name for name in (*texts, *(["report.html"] if runs else []))]
    if runs:
        targets = sorted({cell.measure.target / 100 for cell in plan.cells if cell.measure.target})
        left_out = f" ({'; '.join(plan.reasons)})" if plan.reasons else ""
        # The page begins with the section that has the figure; for tables with the usual one.
        opening = ""
        if any(cell.measure.kind == "classes" for cell in plan.cells):
            opening = "clients"
        elif any(cell.setting.record for cell in plan.cells):
            opening = "recorded"
        page = render(
            title(plan) + left_out, runs, targets, command, opening=opening, by=judged(plan.cells)
        )
        write_page(paths[-1], page)
    return paths


def _labelled(plan: ReproducePlan, summaries: Mapping[RunName, RunSummary]) -> list[RunSummary]:
    """Return the finished runs under the paper's names, with their setting where there are
    several.
    """
    baselines = [cell.baseline for cell in plan.cells if cell.baseline]
    several = len({cell.setting.name for cell in plan.cells}) > 1
    labels = {
        run.key: f"{run.row}, {run.setting.name}" if several else run.row
        for run in (*baselines, *reversed(plan.cells))
    }
    return [
        replace(summary, algorithm=labels[name.setting, name.algorithm])
        for name, summary in summaries.items()
    ]
