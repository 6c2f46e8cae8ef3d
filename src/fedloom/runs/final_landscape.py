"""The loss around the final model of a finished run."""

from pathlib import Path
from typing import Any

from fedloom.common.errors import FedloomError, InvalidValue, quoted
from fedloom.recording.landscape import Landscape
from fedloom.recording.recorder import recorders
from fedloom.runs.config_file import configuration
from fedloom.runs.directory import RunDirectory, read_json
from fedloom.runs.identity import task_digests
from fedloom.serving.artifact import load_model
from fedloom.task import Task

_OF_TASK = ("data", "model", "objective", "metrics", "training", "plugins")


def landscape_recorder(text: str) -> Landscape:
    """Return the recorder of an expression.

    Raises:
        InvalidValue: It is not `landscape`, the only recorder that works after a run.
    """
    recorder = recorders.build(text)
    if not isinstance(recorder, Landscape):
        raise InvalidValue(f"--record {quoted(text)}: only landscape can be recorded afterwards")
    return recorder


def landscape_of(path: Path, recorder: Landscape) -> dict[str, Any]:
    """Return the loss around the final model of the run in a directory.

    Args:
        path: Directory of a finished run.
        recorder: The recorder, with the grid and the directions.

    Returns:
        The losses and the axes, in the form for reports.

    Raises:
        InvalidValue: The run is not finished, or its task cannot be made again.
    """
    directory = RunDirectory(path)
    if not directory.finished:
        raise InvalidValue(f"{path} is not finished: it has no final model yet")
    directory.require_intact()
    task = _task(directory)
    module = load_model(path)
    row = task.layout.flatten(module)
    integers = task.layout.flatten_integers(module)
    return recorder.around(row, task, integers)


def _task(directory: RunDirectory) -> Task:
    """Make the task of a run again, from the keys that describe it."""
    path = directory.path
    stored = directory.configuration
    try:
        table = {key: stored[key] for key in _OF_TASK if key in stored}
        task = configuration(table).task(int(stored["seed"]))
    except FedloomError as error:
        raise InvalidValue(f"{path}: its task cannot be made again ({error})") from None
    digests = task_digests(task)
    written = read_json(path / "task.json", dict)["digests"]
    if any(digests[key] != written[key] for key in ("data", "split")):
        raise InvalidValue(f"{path}: its task cannot be made again (other samples or labels)")
    return task
