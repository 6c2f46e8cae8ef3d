"""Finished runs: read from a folder, reported again, with landscapes of their final models.

landscape.json    in a run's folder: the loss around its final model
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.errors import CheckpointError, FedloomError, InvalidValue
from fedloom.recording.landscape import Landscape
from fedloom.report.page import ReportOptions, options_of, render, render_overview, write_page
from fedloom.report.sheet import Sheet
from fedloom.report.summary import RunSummary
from fedloom.runs.config_file import configuration
from fedloom.runs.directory import (
    RunDirectory,
    locked,
    read_json,
    readable,
    setting_folder,
    write_json,
)
from fedloom.runs.identity import task_digests
from fedloom.runs.settings import label
from fedloom.serving.artifact import load_model
from fedloom.study.trajectories import with_joint_trajectories
from fedloom.task import Task

PAGE = "report.html"

REPORT_LOCK = ".report.lock"
"""Held in a folder while its tables and reports are written, which takes no longer than seconds."""

_FILE = "landscape.json"

_OF_TASK = ("data", "model", "objective", "metrics", "training", "plugins")


@dataclass(frozen=True)
class StoredRun:
    """A run: the label of its setting, its directory, its figures so far, and the keys that its
    setting changes.
    """

    setting: str
    path: Path
    summary: RunSummary
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labelled(self) -> RunSummary:
        """The summary with the setting in its method's name, so that runs of several settings
        differ.
        """
        if not self.setting:
            return self.summary
        recorded = [
            entry
            | {
                "methods": {
                    f"{name}, {self.setting}": way for name, way in entry["methods"].items()
                }
            }
            if entry["kind"] == "trajectories"
            else entry
            for entry in self.summary.recorded
        ]
        name = f"{self.summary.algorithm}, {self.setting}"
        return dataclasses.replace(self.summary, algorithm=name, recorded=recorded)


def read_runs(folder: Path) -> list[StoredRun]:
    """Read the runs of a folder. Raise `InvalidValue` without any, `CheckpointError` for a damaged
    file.
    """
    if not folder.is_dir():
        raise InvalidValue(
            f"{folder} is {'no folder' if folder.exists() else 'not there'}: give a folder of runs"
        )
    runs = [
        StoredRun(setting, path, _summary(path, name), changes)
        for setting, path, name, changes in _paths(folder)
    ]
    if not runs:
        raise InvalidValue(
            f"{folder} holds no run: give the folder of a run or of a comparison, such as runs/digits"
        )
    return runs


def by_setting(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return the runs of each setting, by its label."""
    return {
        name: [run for run in runs if run.setting == name]
        for name in dict.fromkeys(run.setting for run in runs)
    }


def compared(runs: Sequence[StoredRun], options: ReportOptions) -> list[Sheet]:
    """Return a sheet for each setting: its methods, and which of their differences are significant."""
    return [
        Sheet(
            [run.summary for run in group],
            options.targets,
            last=options.last,
            against=options.against,
            measure=options.measure,
            setting=setting,
            changes=group[0].changes if setting else {},
        )
        for setting, group in by_setting(runs).items()
    ]


def with_trajectories(folder: Path, runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the runs with the clients' trajectories that the folder keeps in one plane for several
    methods.
    """
    shown = []
    for setting, group in by_setting(runs).items():
        summaries = with_joint_trajectories(
            setting_folder(folder, setting), [(run.path, run.summary) for run in group]
        )
        shown += [
            dataclasses.replace(run, summary=summary)
            for run, summary in zip(group, summaries, strict=True)
        ]
    return shown


def write_reports(folder: Path, runs: Sequence[StoredRun], options: ReportOptions) -> list[Path]:
    """Write `report.html`, and one in the folder of each setting where there are several; return
    them, the former first.
    """
    groups = {
        name: [run.summary for run in group]
        for name, group in by_setting(with_trajectories(folder, runs)).items()
    }
    sheets = compared(runs, options)
    sheets = [entry for entry in sheets if entry.setting] or sheets
    pages = {entry.setting: setting_folder(folder, entry.setting) / PAGE for entry in sheets}
    title, command = options.title, options.command
    with readable(folder):
        for entry in sheets:
            heading = f"{title}, {entry.setting}" if entry.setting else title
            write_page(
                pages[entry.setting],
                render(heading, groups[entry.setting], command=command, sheet=entry),
            )
        if "" in pages or not pages:
            return list(pages.values())
        links = {setting: path.relative_to(folder).as_posix() for setting, path in pages.items()}
        write_page(
            folder / PAGE,
            render_overview(title, sheets, {name: groups[name] for name in pages}, links, command),
        )
    return [folder / PAGE, *pages.values()]


def rewrite_reports(folder: Path, runs: Sequence[StoredRun]) -> list[Path]:
    """Write the reports again, with the options of the present ones, and return the files."""
    with locked(folder / REPORT_LOCK, wait=True):
        return write_reports(folder, runs, report_options(folder, runs))


def report_options(folder: Path, runs: Sequence[StoredRun]) -> ReportOptions:
    """Return the options of the reports in the folder of these runs; usual ones where there is
    none.
    """
    stored = (
        dataclasses.replace(options, title=options.title.removesuffix(f", {setting}"))
        for setting in ("", *by_setting(runs))
        if (options := options_of(setting_folder(folder, setting) / PAGE))
    )
    first = runs[0].summary
    single = (folder / "configuration.json").exists()
    title = f"{first.algorithm}, seed {first.seed}" if single else folder.resolve().name
    options = next(stored, None) or ReportOptions(title)
    return dataclasses.replace(
        options, targets=options.targets or tuple(first.configuration.get("targets", ()))
    )


def add_landscapes(
    runs: Sequence[StoredRun], recorder: Landscape, say: Callable[[str], None]
) -> None:
    """Compute the loss around the final model of each method's first run in each setting, for
    `read_runs` to find.

    Raises `InvalidValue` for a run that is not finished, or whose task cannot be made again.
    """
    firsts = {(run.setting, run.summary.algorithm): run for run in reversed(runs)}
    for run in reversed(firsts.values()):
        say(f"loss landscape of {run.labelled.algorithm}, seed {run.summary.seed}")
        write_json(run.path / _FILE, landscape_of(run.path, recorder))


def landscape_of(path: Path, recorder: Landscape) -> dict[str, Any]:
    """Return the loss around the final model of the run in this directory. Raises as
    `add_landscapes`.
    """
    if not RunDirectory(path).finished:
        raise InvalidValue(f"{path} is not finished: it has no final model yet")
    RunDirectory(path).require_intact()
    task = _task(path)
    module = load_model(path)
    row, integers = task.layout.flatten(module), task.layout.flatten_integers(module)
    return recorder.around(row, task, integers)


def _paths(folder: Path) -> Iterator[tuple[str, Path, str | None, Mapping[str, Any]]]:
    """Yield setting, directory and method (None: as configured) of every run, and the keys that the
    setting changes.
    """
    if (folder / "configuration.json").exists():
        yield "", folder, None, {}
        return
    comparison = folder / "comparison.json"
    listed = (
        read_json(comparison, dict, "remove it, or compare again").get("runs", [])
        if comparison.exists()
        else []
    )
    with readable(comparison):
        runs = [
            (
                dict(run.get("setting") or {}),
                _moved(folder, Path(run["directory"])),
                str(run["algorithm"]),
            )
            for run in listed
        ]
    for changes, path, algorithm in runs:
        yield label(changes), path, algorithm, changes
    if not runs:
        for pattern in ("*/seed-*", "*/*/seed-*"):
            for path in sorted(folder.glob(f"{pattern}/task.json")):
                inside = path.parent.relative_to(folder).parts
                setting = "" if len(inside) == 2 else inside[0]
                yield setting, path.parent, None, {"setting": setting} if setting else {}


def _moved(folder: Path, noted: Path) -> Path:
    """Return the directory that was noted under this name, also when the folder was moved or is
    mounted elsewhere.
    """
    candidates = (*(folder.joinpath(*noted.parts[-depth:]) for depth in (2, 3)), noted)
    path = next((path for path in candidates if (path / "configuration.json").exists()), None)
    if path is None:
        raise CheckpointError(f"{folder}: the run {noted} is not there any more: compare again")
    return path


def _summary(path: Path, name: str | None) -> RunSummary:
    """Return the run's figures, with the landscape that belongs to its final model."""
    summary = RunDirectory(path).summary(name)
    if not (path / _FILE).exists():
        return summary
    landscape = read_json(path / _FILE, dict, "remove it")
    with readable(path / _FILE):
        landscape["kind"]
    others = [entry for entry in summary.recorded if entry["kind"] != "landscape"]
    return dataclasses.replace(summary, recorded=[*others, landscape])


def _task(path: Path) -> Task:
    stored = RunDirectory(path).configuration
    try:
        # The rest of the configuration is no part of the task, and might ask for what is not needed
        # here.
        task = configuration({key: stored[key] for key in _OF_TASK if key in stored}).task(
            int(stored["seed"])
        )
    except FedloomError as error:
        raise InvalidValue(f"{path}: its task cannot be made again ({error})") from None
    digests, stored = task_digests(task), read_json(path / "task.json", dict)["digests"]
    if any(digests[key] != stored[key] for key in ("data", "split")):
        raise InvalidValue(f"{path}: its task cannot be made again (other samples or labels)")
    return task
