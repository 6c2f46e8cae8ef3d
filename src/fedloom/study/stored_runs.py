"""The runs in a folder, with their figures."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.common.errors import CheckpointError, InvalidValue
from fedloom.recording.landscape import Landscape
from fedloom.report.summary import RunSummary
from fedloom.runs.directory import LANDSCAPE, RunDirectory, read_json, readable, write_json
from fedloom.runs.final_landscape import landscape_of
from fedloom.runs.settings import label


@dataclass(frozen=True)
class StoredRun:
    """A run in a folder.

    Attributes:
        setting: Label of the run's setting, or "".
        path: The run's directory.
        summary: The figures so far.
        changes: The configuration keys that the setting changes.
    """

    setting: str
    path: Path
    summary: RunSummary
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labelled(self) -> RunSummary:
        """The summary with the setting in the name of its method, which separates settings."""
        if not self.setting:
            return self.summary
        recorded = []
        for entry in self.summary.recorded:
            if entry["kind"] == "trajectories":
                methods = {f"{name}, {self.setting}": way for name, way in entry["methods"].items()}
                entry = entry | {"methods": methods}
            recorded.append(entry)
        name = f"{self.summary.algorithm}, {self.setting}"
        return dataclasses.replace(self.summary, algorithm=name, recorded=recorded)

    @property
    def name(self) -> dict[str, Any]:
        """The method and the seed."""
        return {"method": self.summary.algorithm, "seed": self.summary.seed}


def read_runs(folder: Path) -> list[StoredRun]:
    """Read the runs of a folder.

    Args:
        folder: Folder of a run or of a comparison.

    Returns:
        The runs with their figures so far.

    Raises:
        InvalidValue: There is no run.
        CheckpointError: A file is damaged.
    """
    if not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "does not exist"
        raise InvalidValue(f"{folder} {reason}: give a folder of runs")
    runs = [
        StoredRun(setting, path, _summary(path, name), changes)
        for setting, path, name, changes in _paths(folder)
    ]
    if not runs:
        raise InvalidValue(
            f"{folder} holds no run: give the folder of a run or of a comparison, such as "
            "runs/digits"
        )
    if (folder / "comparison.json").exists():
        return runs  # it has the labels
    for group in by_setting(runs).values():
        named = distinct({run.path: run.summary for run in group})
        renamed = dict(zip((run.path for run in group), named, strict=True))
        runs = [
            dataclasses.replace(run, summary=renamed.get(run.path, run.summary)) for run in runs
        ]
    return runs


def distinct(runs: Mapping[Path, RunSummary]) -> list[RunSummary]:
    """Return runs by their directories, named by the folders where methods have the same name.

    A comparison may hold one algorithm with several settings, each in its own folder.
    """
    folders: dict[str, set[str]] = {}
    for path, run in runs.items():
        folders.setdefault(run.algorithm, set()).add(path.parent.name)
    return [
        dataclasses.replace(run, algorithm=path.parent.name)
        if len(folders[run.algorithm]) > 1
        else run
        for path, run in runs.items()
    ]


def by_setting(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return the runs of each setting, by its label."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return groups


def _paths(folder: Path) -> Iterator[tuple[str, Path, str | None, Mapping[str, Any]]]:
    """Yield setting, directory, method (None: as configured) and changed keys of every run."""
    if (folder / "configuration.json").exists():
        yield "", folder, None, {}
        return
    comparison, runs = folder / "comparison.json", []
    if comparison.exists():
        listed = read_json(comparison, dict, "remove it, or compare again").get("runs", [])
        with readable(comparison):
            for run in listed:
                path = _moved(folder, Path(run["directory"]))
                runs.append((dict(run.get("setting") or {}), path, str(run["algorithm"])))
    for changes, path, algorithm in runs:
        yield label(changes), path, algorithm, changes
    if not runs:
        for pattern in ("*/seed-*", "*/*/seed-*"):
            for path in sorted(folder.glob(f"{pattern}/task.json")):
                inside = path.parent.relative_to(folder).parts
                setting = "" if len(inside) == 2 else inside[0]
                yield setting, path.parent, None, {"setting": setting} if setting else {}


def _moved(folder: Path, noted: Path) -> Path:
    """Return the directory of a run, also when the folder was moved or is mounted elsewhere."""
    for path in (*(folder.joinpath(*noted.parts[-depth:]) for depth in (2, 3)), noted):
        if (path / "configuration.json").exists():
            return path
    raise CheckpointError(f"{folder}: the run {noted} is not there any more: compare again")


def _summary(path: Path, name: str | None) -> RunSummary:
    """Return the figures of a run, with the landscape of its final model."""
    summary, file = RunDirectory(path).summary(name), path / LANDSCAPE
    if not file.exists():
        return summary
    landscape = read_json(file, dict, "remove it")
    with readable(file):
        landscape["kind"]
    others = [entry for entry in summary.recorded if entry["kind"] != "landscape"]
    return dataclasses.replace(summary, recorded=[*others, landscape])


def add_landscapes(
    runs: Sequence[StoredRun], recorder: Landscape, show: Callable[[str], None]
) -> None:
    """Compute the loss around the final model of each method's first run in each setting.

    Args:
        runs: The runs. `read_runs` finds their landscapes from now on.
        recorder: The recorder of landscapes.
        show: Called with a line before each run.

    Raises:
        InvalidValue: A run is not finished, or its task cannot be made again.
    """
    first_runs = {(run.setting, run.summary.algorithm): run for run in reversed(runs)}
    for run in reversed(first_runs.values()):
        show(f"loss landscape of {run.labelled.algorithm}, seed {run.summary.seed}")
        write_json(run.path / LANDSCAPE, landscape_of(run.path, recorder))
