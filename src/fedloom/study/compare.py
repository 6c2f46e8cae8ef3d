"""Compare methods in Python."""

import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from fedloom.algorithm.method import Method
from fedloom.common.errors import InvalidValue
from fedloom.parts.building import build
from fedloom.rounds.clock import Clock
from fedloom.rounds.schedule import Schedule, Stop
from fedloom.runs.config_file import configuration
from fedloom.runs.progress import progress
from fedloom.runs.python_objects import PythonObjects, TaskOf
from fedloom.runs.settings import require_key
from fedloom.study.comparison import Comparison
from fedloom.study.comparison_result import ComparisonResult


def compare(
    methods: Mapping[str, Method | str] | Sequence[Method | str],
    task: TaskOf,
    *,
    seeds: Iterable[int] = (0,),
    directory: str | Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
    **options: Any,
) -> ComparisonResult:
    """Compare methods over several seeds, as `fedloom compare` does: a few runs at a time, resumed,
    tested in pairs.

    Args:
        methods: Methods by label, such as `{"FedAvg": "fedavg", "mine": Mine(step=0.5)}`, or a list
            of them.
        task: The task, with the same data, split and initial model for every seed; or a function
            from a seed to a task, which draws these anew.
        seeds: The seeds, such as `range(5)`. More of them later repeat nothing.
        directory: Folder of the runs. The same call continues where it was interrupted and reads
            finished runs; with more `rounds` it lengthens them. By default a folder that is removed
            with the result.
        fresh: Start all runs again.
        quiet: Show no progress.
        **options: Fields of the `Schedule`, such as `rounds=50`, and other keys of a configuration,
            such as `targets`.

    Returns:
        The runs as tables, frames, figures and tests. What failed is in `failed`.

    Raises:
        InvalidValue: An argument is out of range, or a method does not fit the task.
        CheckpointError: The folder holds another comparison, or a damaged run.
    """
    objects = PythonObjects(labelled(methods), task)
    plan = replace(configuration(python_table(objects, seeds, directory, options)), objects=objects)
    comparison = Comparison.of(plan).side_by_side
    with progress(len(comparison.names), comparison.rounds, quiet) as watch:
        failed = comparison.run(watch, fresh=fresh)
    result = comparison.result(failed)
    if directory is None:
        weakref.finalize(result, rmtree, result.folder, ignore_errors=True)
    return result


_OPTIONS = (
    *(name for name in Schedule.__dataclass_fields__ if name != "seed"),
    "name", "targets", "last", "against", "measure", "record", "trackers", "engine", "workers", "threads", "pool",
)  # fmt: skip
"""Keys of a configuration that are no part of the task."""


def python_table(
    objects: PythonObjects,
    seeds: Iterable[int],
    directory: str | Path | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the table of the configuration of runs in Python. Raises `InvalidValue` for a wrong
    option.
    """
    for key in options:
        require_key(key, _OPTIONS)
    seeds = list(seeds)
    if not seeds:
        raise InvalidValue("nothing to run: give at least one seed")
    task = objects.task(seeds[0])
    if options.get("measure") == "personal" and task.local_test is None:
        raise InvalidValue(
            "measure = 'personal' needs test data of the clients' own: give the task "
            "local_test=0.25"
        )
    folder = tempfile.mkdtemp(prefix="fedloom-") if directory is None else str(directory)
    table: dict[str, Any] = {"name": Path(folder).name}
    if options.get("personal_every") and task.local_test is not None:
        table["measure"] = "personal"
    for key, value in options.items():
        table[key] = asdict(value) if isinstance(value, Clock | Stop) else value
    return table | {"seeds": seeds, "directory": folder, "device": str(task.initial.device)}


def labelled(methods: Mapping[str, Method | str] | Sequence[Method | str]) -> dict[str, Method]:
    """Return methods by label, by default their expression. Raises as `build`."""
    if isinstance(methods, Mapping):
        return {name: build(method) for name, method in methods.items()}
    listed = [methods] if isinstance(methods, str | Method) else methods
    return {str(method): method for method in map(build, listed)}
