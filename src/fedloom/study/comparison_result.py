"""The result of a comparison: its runs as tables, frames of pandas, figures, tests, files and
pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.common.errors import InvalidValue
from fedloom.report import summary as figures
from fedloom.report.export import differences_to_csv, to_csv, to_data, to_latex, to_markdown
from fedloom.report.frames import data_frame
from fedloom.report.method_settings import settings_table, tuning_notes
from fedloom.report.sheet import ReportOptions, Sheet, options_of, overall, reading
from fedloom.report.summary import RunSummary
from fedloom.report.tuning_choice import TUNING, TuningChoice
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import locked, read_json, readable, setting_folder, write_json
from fedloom.runs.events import RunName
from fedloom.runs.run_figures import RunFigures, costs, scores
from fedloom.state.files import remove_unfinished, write_text
from fedloom.study.stored_runs import StoredRun, by_setting, read_runs
from fedloom.study.trajectories import (
    context_of,
    draw_joint_trajectories,
    with_joint_trajectories,
)

if TYPE_CHECKING:
    import pandas

PAGE = "report.html"

REPORT_LOCK = ".report.lock"
"""Held for seconds in a folder while its tables and reports are written."""


@dataclass(frozen=True, repr=False)
class ComparisonResult(RunFigures):
    """Finished runs of a comparison.

    Attributes:
        folder: The folder of the runs.
        runs: Every run with its directory and its figures.
        options: The title, the targets and the measure of tables and reports.
        failed: The reasons of failed runs, each on one line.
    """

    folder: Path
    runs: Sequence[StoredRun]
    options: ReportOptions
    failed: Mapping[RunName, str] = field(default_factory=dict)

    @cached_property
    def sheets(self) -> list[Sheet]:
        """A sheet for each setting with at least one run: its methods, and which differences are
        significant.
        """
        options = self.options
        return [
            Sheet(
                [run.summary for run in group],
                options.targets,
                last=options.last,
                against=options.against,
                measure=options.measure,
                setting=setting,
                changes=group[0].changes if setting else {},
                tuning=_tuning(setting_folder(self.folder, setting) / TUNING),
            )
            for setting, group in by_setting(self.runs).items()
        ]

    def frame(self) -> pandas.DataFrame:
        """Return a row for each run: its method, seed, setting and figures, accuracies as
        shares.
        """
        return data_frame({**run.name, **run.changes, **self._figures(run)} for run in self.runs)

    def _named_runs(self) -> list[tuple[dict[str, Any], RunSummary]]:
        return [({**run.name, **run.changes}, run.labelled) for run in self.runs]

    def differences(self) -> pandas.DataFrame:
        """Return the differences between methods in every measure, with the p of both tests and
        their verdict.
        """
        return data_frame(
            {**line.pop("setting"), **line} for line in to_data(self.sheets)["differences"]
        )

    def method_settings(self) -> pandas.DataFrame:
        """Return the settings in which the methods differ or that were tuned, a row for each
        method and setting, as text.
        """
        tables = [table for sheet in self.sheets if (table := settings_table(sheet)) is not None]
        return data_frame(
            {column.line: cell.text for column, cell in row.items()}
            for table in tables
            for _, row in table.iterrows()
        )

    def latex(self) -> str:
        """Return the tables for a paper; they need the packages booktabs and graphicx."""
        return to_latex(self.sheets, self.options.title)

    def report(self, folder: str | Path | None = None) -> Path:
        """Write the report, and one for each setting.

        Args:
            folder: Where to write it; by default the folder of the runs.

        Returns:
            The file.
        """
        return self.write_reports(self.folder if folder is None else Path(folder))[0]

    def with_trajectories(self) -> list[StoredRun]:
        """Return the runs, with the trajectories of clients with several methods in one plane."""
        return [
            run
            for setting, group in by_setting(self.runs).items()
            for run in with_joint_trajectories(setting_folder(self.folder, setting), group)
        ]

    def write_reports(self, folder: Path) -> list[Path]:
        """Write `report.html`, and with several settings one in the folder of each. Return the
        files, the main one first.
        """
        from fedloom.report.page import render, render_overview, write_page

        runs = {
            setting: [run.summary for run in group]
            for setting, group in by_setting(self.with_trajectories()).items()
        }
        sheets = [entry for entry in self.sheets if entry.setting] or self.sheets
        title, command = self.options.title, self.options.command
        pages = {entry.setting: setting_folder(folder, entry.setting) / PAGE for entry in sheets}
        with readable(folder):
            for entry in sheets:
                heading = f"{title}, {entry.setting}" if entry.setting else title
                page = render(heading, runs[entry.setting], command=command, sheet=entry)
                write_page(pages[entry.setting], page)
            if "" in pages or not pages:
                return list(pages.values())
            links = {name: path.relative_to(folder).as_posix() for name, path in pages.items()}
            groups = {name: runs[name] for name in pages}
            overview = render_overview(title, sheets, groups, links, command)
            write_page(folder / PAGE, overview)
        return [folder / PAGE, *pages.values()]

    def rewrite_reports(self) -> list[Path]:
        """Write the reports of the folder again and return the files."""
        with locked(self.folder / REPORT_LOCK, wait=True):
            return self.write_reports(self.folder)

    def write(self, configuration: Configuration) -> None:
        """Write tables, tests and reports. The lock keeps the files of one process together."""
        folder, title, sheets = self.folder, self.options.title, self.sheets
        with locked(folder / REPORT_LOCK, wait=True):
            remove_unfinished(folder)
            runs = [
                {
                    "algorithm": run.summary.algorithm,
                    "seed": run.summary.seed,
                    "setting": dict(run.changes),
                    **self._figures(run),
                    "directory": str(run.path),
                }
                for run in self.runs
            ]
            failed = []
            for name, reason in self.failed.items():
                changes = configuration.settings[name.setting].changes
                failed.append({**name._asdict(), "setting": changes, "reason": reason})
            table = {**to_data(sheets), "runs": runs, "failed": failed}
            write_json(folder / "comparison.json", table)
            write_text(folder / "comparison.csv", to_csv(sheets))
            write_text(folder / "comparison.md", to_markdown(sheets, title))
            write_text(folder / "comparison.tex", to_latex(sheets, title))
            write_text(folder / "differences.csv", differences_to_csv(sheets))
            for setting, group in by_setting(self.runs).items():
                context = partial(context_of, configuration.settings[setting])
                draw_joint_trajectories(setting_folder(folder, setting), group, context)
            self.write_reports(folder)

    @property
    def shown(self) -> pandas.DataFrame:
        """The table as a terminal shows it."""
        if not self.sheets:
            raise InvalidValue(
                f"no run has finished: {next(iter(self.failed.values()), 'none was started')}"
            )
        return overall(self.sheets) if len(self.sheets) > 1 else self.sheets[0].table

    @property
    def notes(self) -> list[str]:
        """Sentences below the table."""
        failures = [f"{name} failed: {reason}" for name, reason in self.failed.items()]
        return [
            *failures,
            *tuning_notes(self.sheets),
            *reading(self.sheets),
            f"runs: {self.folder}",
        ]

    def _figures(self, run: StoredRun) -> dict[str, Any]:
        summary = run.summary
        keys = {target: figures.target_key(target) for target in self.options.targets}
        to_targets = {
            f"{cost}_to": {
                key: figures.measured(summary, cost, target=target) for target, key in keys.items()
            }
            for cost in figures.TO_TARGET
        }
        return {
            **scores(summary),
            "mean_of_last": figures.mean_of_last(summary, self.options.last),
            f"personal_{summary.metric.name}": figures.personal(summary),
            **to_targets,
            **costs(summary),
            "simulated_seconds": figures.simulated_seconds(summary),
        }


def read_comparison(folder: str | Path) -> ComparisonResult:
    """Read a folder of `fl.compare` or `fedloom compare`, finished or not; nothing is trained.

    Args:
        folder: Such as `runs/digits`.

    Returns:
        The runs with their tables, frames, figures and tests.

    Raises:
        InvalidValue: The folder holds no run.
        CheckpointError: A file is damaged.
    """
    path = Path(folder)
    runs = read_runs(path)
    return ComparisonResult(path, runs, _options(path, runs))


def _tuning(path: Path) -> dict[str, TuningChoice]:
    """Return the choices of a setting by method; empty where nothing was tuned."""
    if not path.exists():
        return {}
    table = read_json(path, dict, "compare again with the same values to tune")
    with readable(path):
        return {str(name): TuningChoice.of(choice) for name, choice in table["methods"].items()}


def _options(folder: Path, runs: Sequence[StoredRun]) -> ReportOptions:
    """Return the options of the reports in the folder of these runs, or the usual ones."""
    first_run = runs[0].summary
    single = (folder / "configuration.json").exists()
    title = f"{first_run.algorithm}, seed {first_run.seed}" if single else folder.resolve().name
    options = ReportOptions(title)
    for setting in ("", *by_setting(runs)):
        if stored := options_of(setting_folder(folder, setting) / PAGE):
            title = stored.title.removesuffix(f", {setting}")
            options = dataclasses.replace(stored, title=title)
            break
    targets = options.targets or tuple(first_run.configuration.get("targets", ()))
    return dataclasses.replace(options, targets=targets)
