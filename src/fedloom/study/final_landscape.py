"""The loss around the final models of finished runs.

landscape.json    in a run's folder: the loss around its final model
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedloom.errors import FedloomError, InvalidValue
from fedloom.recording.landscape import Landscape
from fedloom.runs.config_file import configuration
from fedloom.runs.directory import RunDirectory, read_json, write_json
from fedloom.runs.identity import task_digests
from fedloom.serving.artifact import load_model
from fedloom.study.stored_runs import LANDSCAPE, StoredRun
from fedloom.task import Task

_OF_TASK = ("data", "model", "objective", "metrics", "training", "plugins")


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


def landscape_of(path: Path, recorder: Landscape) -> dict[str, Any]:
    """Return the loss around the final model of the run in a directory. Raises as
    `add_landscapes`.
    """
    directory = RunDirectory(path)
    if not directory.finished:
        raise InvalidValue(f"{path} is not finished: it has no final model yet")
    directory.require_intact()
    task = _task(directory)
    module = load_model(path)
    row, integers = task.layout.flatten(module), task.layout.flatten_integers(module)
    return recorder.around(row, task, integers)


def _task(directory: RunDirectory) -> Task:
    """Make the task of a run again, from the keys that describe it."""
    path, stored = directory.path, directory.configuration
    try:
        table = {key: stored[key] for key in _OF_TASK if key in stored}
        task = configuration(table).task(int(stored["seed"]))
    except FedloomError as error:
        raise InvalidValue(f"{path}: its task cannot be made again ({error})") from None
    digests, written = task_digests(task), read_json(path / "task.json", dict)["digests"]
    if any(digests[key] != written[key] for key in ("data", "split")):
        raise InvalidValue(f"{path}: its task cannot be made again (other samples or labels)")
    return task
