"""Where the reports of an experiment lie: one page, or one for each setting in its folder and one over all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedloom.experiment.directory import folder_name
from fedloom.report import write_report
from fedloom.report.page import write_overview
from fedloom.report.sheet import Sheet
from fedloom.report.summary import RunSummary

PAGE = "report.html"

Part = tuple[Sheet, Sequence[RunSummary]]
"""A setting: its methods compared, and the runs that were."""


def setting_folder(folder: Path, setting: str) -> Path:
    """Where the page of a setting lies in a comparison's folder; in the folder itself where there are no settings."""
    return folder / folder_name(setting) if setting else folder


def write_pages(folder: Path, title: str, parts: Sequence[Part], command: str) -> list[Path]:
    """Write the report of these settings; the pages, that of the folder first. Nothing where no setting has a run."""
    settings = [(setting_folder(folder, one.setting), one, runs) for one, runs in parts if one.setting]
    if not settings:
        for one, runs in parts:
            write_report(folder / PAGE, title, runs, command=command, sheet=one)
        return [folder / PAGE] if parts else []
    for place, one, runs in settings:
        write_report(place / PAGE, f"{title}, {one.setting}", runs, command=command, sheet=one)
    pages = {one.setting: f"{place.name}/{PAGE}" for place, one, _ in settings}
    by_setting = {one.setting: runs for _, one, runs in settings}
    write_overview(folder / PAGE, title, [one for _, one, _ in settings], by_setting, pages, command)
    return [folder / PAGE, *(place / PAGE for place, _, _ in settings)]
