"""The runs that lie in a folder, read again: their reports from what is recorded, and landscapes of their final models.

landscape.json    in a run's folder: the loss around its final model, and the digest of the model that it belongs to
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.data.partition import Partition
from fedloom.errors import CheckpointError, FedloomError, InvalidValue, suggestion
from fedloom.experiment.artifact import load_model
from fedloom.experiment.configuration import configuration
from fedloom.experiment.directory import RunDirectory, folder_name, locked, read_json, write_json
from fedloom.experiment.settings import label
from fedloom.experiment.trajectories import together
from fedloom.recording.landscape import Landscape
from fedloom.report.page import ReportOptions, options_of, write_overview, write_report
from fedloom.report.sheet import Sheet, sheet
from fedloom.report.summary import RunSummary
from fedloom.state.tensors import read_tensors
from fedloom.task import Task

PAGE = "report.html"

ALL = "all"
"""Stands for every method where methods are named."""

REPORT_LOCK = ".report.lock"
"""Held in a folder while its tables and reports are written, which takes no longer than seconds."""

_FILE = "landscape.json"

_logger = logging.getLogger("fedloom")

_OF_TASK = ("data", "model", "training", "plugins")


@dataclass(frozen=True)
class StoredRun:
    """A run: the label of its setting, where it lies, what it has left so far, and what its setting changes."""

    setting: str
    place: Path
    summary: RunSummary
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labelled(self) -> RunSummary:
        """The summary with the setting in its method's name, so that runs of several settings stay apart."""
        if not self.setting:
            return self.summary
        recorded = [
            one | {"methods": {f"{name}, {self.setting}": way for name, way in one["methods"].items()}}
            if one["kind"] == "trajectories"
            else one
            for one in self.summary.recorded
        ]
        return dataclasses.replace(
            self.summary, algorithm=f"{self.summary.algorithm}, {self.setting}", recorded=recorded
        )


def read_runs(folder: Path) -> list[StoredRun]:
    """The runs of a run's folder or of a comparison's, in the comparison's order; unfinished ones too where it is not over.

    Raises `InvalidValue` when there are none, and `CheckpointError` when a file is missing or damaged.
    """
    if not folder.is_dir():
        raise InvalidValue(f"{folder} is {'no folder' if folder.exists() else 'not there'}: give a folder of runs")
    places = list(_places(folder))
    if not places:
        raise InvalidValue(f"{folder} holds no run: give the folder of a run or of a comparison, such as runs/digits")
    return [StoredRun(setting, place, _summary(place, name), changes) for setting, place, name, changes in places]


def setting_folder(folder: Path, setting: str) -> Path:
    """Where the page of a setting lies in a comparison's folder; in the folder itself where there are no settings."""
    return folder / folder_name(setting) if setting else folder


def write_pages(
    folder: Path, title: str, parts: Sequence[tuple[Sheet, Sequence[RunSummary]]], command: str
) -> list[Path]:
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


def by_setting(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """The runs of each setting, by its label."""
    return {name: [run for run in runs if run.setting == name] for name in dict.fromkeys(run.setting for run in runs)}


def compared(runs: Sequence[StoredRun], options: ReportOptions) -> list[Sheet]:
    """For each setting its methods, and which of their differences are significant."""
    return [
        sheet(
            [run.summary for run in own],
            options.targets,
            last=options.last,
            against=options.against,
            measure=options.measure,
            setting=setting,
            changes=own[0].changes,
        )
        for setting, own in by_setting(runs).items()
    ]


def with_trajectories(folder: Path, runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs with the clients' trajectories that the folder keeps in one plane for several methods."""
    found = []
    for setting, own in by_setting(runs).items():
        summaries = together(setting_folder(folder, setting), [(run.place, run.summary) for run in own])
        found += [dataclasses.replace(run, summary=summary) for run, summary in zip(own, summaries, strict=True)]
    return found


def write_reports(folder: Path, runs: Sequence[StoredRun], options: ReportOptions) -> list[Path]:
    """Write `report.html`, and where there are several settings one for each in its folder; the files."""
    groups = by_setting(with_trajectories(folder, runs)).values()
    shown = [[run.summary for run in own] for own in groups]
    return write_pages(folder, options.title, list(zip(compared(runs, options), shown, strict=True)), options.command)


def rewrite_reports(folder: Path, runs: Sequence[StoredRun]) -> list[Path]:
    """Write the reports anew; the files.

    Title, targets, what the methods are judged by and the command are those of the report that is there, as far as there is one.
    """
    settings = list(by_setting(runs))
    before = (
        options_of(folder / PAGE) or _options_by_setting(folder, settings) or ReportOptions(_usual_title(folder, runs))
    )
    targets = before.targets or tuple(runs[0].summary.configuration.get("targets", ()))
    with locked(folder / REPORT_LOCK, wait=True):
        return write_reports(folder, runs, dataclasses.replace(before, targets=targets))


def add_landscapes(
    runs: Sequence[StoredRun],
    wanted: Sequence[str],
    recorder: Landscape,
    say: Callable[[str], None] = lambda text: None,
) -> list[StoredRun]:
    """The runs with the loss around the final models of those that are wanted: methods by name, `all`, or folders of runs.

    Of a method it is the first run in each setting. What is found is kept in the run's folder; the landscapes of all other runs
    are left out of the answer. `say` hears of each run before it begins. Raises `InvalidValue` for an unknown method, a run
    that is not finished, or one whose task was made in Python.
    """
    chosen = _chosen(runs, wanted)
    result = []
    for run in runs:
        if run in chosen:
            say(f"loss landscape of {run.labelled.algorithm}, seed {run.summary.seed}")
            kept = {"model": _digest(run.place), "landscape": landscape_of(run.place, recorder)}
            write_json(run.place / _FILE, kept)
            summary = _summary(run.place, run.summary.algorithm)
        else:
            summary = dataclasses.replace(run.summary, recorded=_without_landscape(run.summary))
        result.append(dataclasses.replace(run, summary=summary))
    return result


def landscape_of(place: Path, recorder: Landscape) -> dict[str, Any]:
    """The loss around the final model of the run that lies there. Raises as `add_landscapes` does."""
    if not RunDirectory(place).finished:
        raise InvalidValue(f"{place} is not finished: it has no final model yet")
    task = _task(place)
    module = load_model(place)
    row, integers = task.layout.flatten(module), task.layout.flatten_integers(module)
    return recorder.around(row, task, integers)


def _places(folder: Path) -> Iterator[tuple[str, Path, str | None, Mapping[str, Any]]]:
    """Setting, folder and method (None: as configured) of every run, and what the setting changes."""
    if (folder / "configuration.json").exists():
        yield "", folder, None, {}
        return
    kept = folder / "comparison.json"
    listed = read_json(kept, dict, "remove it, or compare again").get("runs", []) if kept.exists() else []
    for one in listed:
        changes = one.get("setting") or {}
        yield label(changes), _moved(folder, Path(one["directory"])), str(one["algorithm"]), changes
    if not listed:
        for pattern in ("*/seed-*", "*/*/seed-*"):
            for path in sorted(folder.glob(f"{pattern}/task.json")):
                inside = path.parent.relative_to(folder).parts
                setting = "" if len(inside) == 2 else inside[0]
                yield setting, path.parent, None, {"setting": setting} if setting else {}


def _moved(folder: Path, noted: Path) -> Path:
    """Where a run lies that was noted under this name, also when the folder was moved or is seen from elsewhere."""
    inside = (folder.joinpath(*noted.parts[-depth:]) for depth in (2, 3))
    found = next((place for place in (*inside, noted) if (place / "configuration.json").exists()), None)
    if found is None:
        raise CheckpointError(f"{folder}: the run {noted} is not there any more: compare again")
    return found


def _summary(place: Path, name: str | None) -> RunSummary:
    """What the run has left, with the landscape that belongs to its final model."""
    summary = RunDirectory(place).summary(name)
    if not (place / _FILE).exists() or not (place / "model.safetensors").exists():
        return summary
    kept = read_json(place / _FILE, dict, "remove it")
    if kept.get("model") != _digest(place):
        _logger.warning(
            "%s is damaged or was replaced: the loss landscape around the model that was there is left out",
            place / "model.safetensors",
        )
        return summary
    return dataclasses.replace(summary, recorded=[*_without_landscape(summary), kept["landscape"]])


def _without_landscape(summary: RunSummary) -> list[dict[str, Any]]:
    return [one for one in summary.recorded if one["kind"] != "landscape"]


def _options_by_setting(folder: Path, settings: Sequence[str]) -> ReportOptions | None:
    """The options of the report of a setting, without its setting."""
    pages = ((setting, options_of(setting_folder(folder, setting) / PAGE)) for setting in settings if setting)
    return next(
        (dataclasses.replace(one, title=one.title.removesuffix(f", {setting}")) for setting, one in pages if one), None
    )


def _usual_title(folder: Path, runs: Sequence[StoredRun]) -> str:
    one = runs[0].summary
    single = (folder / "configuration.json").exists()
    return f"{one.algorithm}, seed {one.seed}" if single else folder.resolve().name


def _chosen(runs: Sequence[StoredRun], wanted: Sequence[str]) -> list[StoredRun]:
    methods = list(dict.fromkeys(run.summary.algorithm for run in runs))
    first: dict[tuple[str, str], StoredRun] = {}
    for run in runs:
        first.setdefault((run.setting, run.summary.algorithm), run)
    chosen: list[StoredRun] = []
    for name in wanted:
        lying = [run for run in runs if run.place.resolve() == Path(name).resolve()]
        named = [run for (_, method), run in first.items() if name in (method, ALL)]
        if not lying and not named:
            raise InvalidValue(
                f"unknown method {name!r}{suggestion(name, methods)} (there are: {', '.join((*methods, ALL))})"
            )
        chosen += lying or named
    return chosen


def _task(place: Path) -> Task:
    """The run's task, made again from its configuration."""
    told = RunDirectory(place).configuration
    try:
        # The rest of the configuration is no part of the task, and might ask for what is not needed here.
        task = configuration({key: told[key] for key in _OF_TASK if key in told}).task(int(told["seed"]))
    except FedloomError as error:
        raise InvalidValue(f"{place}: its task cannot be made again ({error})") from None
    kept = Partition.load(place / "split.npz")
    same = np.array_equal(task.partition.indices, kept.indices) and np.array_equal(task.partition.offsets, kept.offsets)
    if same and task.true_labels is not None:
        same = torch.equal(task.train.labels, read_tensors(place / "labels.safetensors")[0]["given"])
    if not same:
        raise InvalidValue(f"{place}: its task cannot be made again (other samples or labels)")
    return task


def _digest(place: Path) -> str:
    return hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest()
