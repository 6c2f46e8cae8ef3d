"""The result of a comparison: its runs as tables, frames of pandas, figures, tests, files and
pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import InvalidValue
from fedloom.report import summary as figures
from fedloom.report.export import differences_to_csv, to_csv, to_data, to_latex, to_markdown
from fedloom.report.frames import data_frame
from fedloom.report.page import ReportOptions
from fedloom.report.sheet import Sheet, overall, reading
from fedloom.report.summary import RunSummary
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import locked, setting_folder, write_json
from fedloom.runs.events import RunName
from fedloom.runs.run_figures import RunFigures, costs, scores
from fedloom.state.files import remove_unfinished, write_text
from fedloom.study.finished import (
    REPORT_LOCK,
    StoredRun,
    by_setting,
    compared,
    read_runs,
    report_options,
    write_reports,
)
from fedloom.study.trajectories import context_of, draw_joint_trajectories

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class ComparisonResult(RunFigures):
    """The runs of a comparison, as far as they came to their end.

    Attributes:
        folder: The folder of the runs.
        runs: Every run with its directory and its figures.
        options: The title, the targets and the measure of tables and reports.
        failed: Why runs failed, on one line, by run.
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
        return compared(self.runs, self.options)

    def frame(self) -> pandas.DataFrame:
        """Return a row for each run: its method, seed, setting and figures, accuracies as shares."""
        return data_frame({**_name(run), **self._figures(run)} for run in self.runs)

    def _named_runs(self) -> list[tuple[dict[str, Any], RunSummary]]:
        return [(_name(run), run.labelled) for run in self.runs]

    def differences(self) -> pandas.DataFrame:
        """Return the differences between methods in every measure, with the p of both tests and
        their verdict.
        """
        return data_frame(
            {**line.pop("setting"), **line} for line in to_data(self.sheets)["differences"]
        )

    def latex(self) -> str:
        """Return the tables for a paper; they need the packages booktabs and graphicx."""
        return to_latex(self.sheets, self.options.title)

    def report(self, folder: str | Path | None = None) -> Path:
        """Write the report, and one for each setting, to a folder (by default that of the runs);
        return its page.
        """
        return write_reports(
            self.folder if folder is None else Path(folder), self.runs, self.options
        )[0]

    def write(self, configuration: Configuration) -> None:
        """Write tables, tests and reports. One process at a time does, so that the files belong
        together.
        """
        folder, title, sheets = self.folder, self.options.title, self.sheets
        with locked(folder / REPORT_LOCK, wait=True):
            remove_unfinished(folder)
            failures = [
                {
                    **name._asdict(),
                    "setting": configuration.settings[name.setting].changes,
                    "reason": text,
                }
                for name, text in self.failed.items()
            ]
            runs = [
                {
                    **_name(run, setting=dict(run.changes)),
                    **self._figures(run),
                    "directory": str(run.path),
                }
                for run in self.runs
            ]
            write_json(
                folder / "comparison.json", {**to_data(sheets), "runs": runs, "failed": failures}
            )
            write_text(folder / "comparison.csv", to_csv(sheets))
            write_text(folder / "comparison.md", to_markdown(sheets, title))
            write_text(folder / "comparison.tex", to_latex(sheets, title))
            write_text(folder / "differences.csv", differences_to_csv(sheets))
            for setting, group in by_setting(self.runs).items():
                context = partial(context_of, configuration.settings[setting])
                summaries = [(run.path, run.summary) for run in group]
                draw_joint_trajectories(setting_folder(folder, setting), summaries, context)
            write_reports(folder, self.runs, self.options)

    @property
    def shown(self) -> pandas.DataFrame:
        """The table as a terminal shows it."""
        if not self.sheets:
            raise InvalidValue(
                f"no run came to its end: {next(iter(self.failed.values()), 'there is none')}"
            )
        return overall(self.sheets) if len(self.sheets) > 1 else self.sheets[0].table

    @property
    def notes(self) -> list[str]:
        """Sentences below the table."""
        failures = [f"{name} failed: {reason}" for name, reason in self.failed.items()]
        return [*failures, *reading(self.sheets), f"runs: {self.folder}"]

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


def _name(run: StoredRun, **setting: Any) -> dict[str, Any]:
    """Return the method, the seed and the setting of a run, by default with a column for each of
    its keys.
    """
    return {
        "algorithm": run.summary.algorithm,
        "seed": run.summary.seed,
        **(setting or run.changes),
    }


def read_comparison(folder: str | Path) -> ComparisonResult:
    """Read a folder of runs, that of `fl.compare` or of `fedloom compare`, finished or not; nothing
    is trained.

    Args:
        folder: Such as `runs/digits`.

    Returns:
        The runs with their tables, frames, figures and tests.

    Raises:
        InvalidValue: There is no run in the folder.
        CheckpointError: A file is damaged.
    """
    path = Path(folder)
    runs = read_runs(path)
    return ComparisonResult(path, runs, report_options(path, runs))
