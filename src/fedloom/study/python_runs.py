"""Methods, task and options of `fl.compare` and `fl.tune` as a configuration."""

import functools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fedloom.algorithm.method import Method
from fedloom.common.errors import InvalidValue, quoted
from fedloom.rounds.clock import Clock
from fedloom.rounds.schedule import Schedule, Stop
from fedloom.runs.config_file import configuration, require_not_own
from fedloom.runs.configuration import Configuration
from fedloom.runs.entry import Chosen, Entry, Own, entry_of, own_key
from fedloom.runs.python_objects import PythonObjects, TaskOf
from fedloom.runs.settings import require_key

Methods = (
    Mapping[str, Method | str | Entry | Chosen] | Sequence[Method | str | Entry | Chosen] | Chosen
)
"""Methods by label, or a list of them."""


_OPTIONS = (
    *(name for name in Schedule.__dataclass_fields__ if name != "seed"),
    "name", "targets", "last", "against", "measure", "record", "trackers",
    "engine", "workers", "threads", "pool", "settings",
)  # fmt: skip
"""Keys of a configuration that are no part of the task."""


def python_table(
    objects: PythonObjects,
    seeds: Iterable[int],
    directory: str | Path | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the table of the configuration of runs in Python.

    Args:
        objects: The methods and the task.
        seeds: The seeds, at least one.
        directory: Folder of the runs.
        options: Values by key, of the schedule and of the comparison.

    Returns:
        A table as in a configuration file, without methods and data.

    Raises:
        InvalidValue: A key or its value is not allowed.
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
    folder = str(directory)
    table: dict[str, Any] = {"name": Path(folder).name}
    if options.get("personal_every") and task.local_test is not None:
        table["measure"] = "personal"
    for key, value in options.items():
        table[key] = asdict(value) if isinstance(value, Clock | Stop) else value
    return table | {"seeds": seeds, "directory": folder, "device": str(task.initial.device)}


def python_configuration(
    table: Mapping[str, Any], objects: PythonObjects, own: Mapping[str, Own]
) -> Configuration:
    """Return the configuration of runs in Python.

    Args:
        table: The `python_table`.
        objects: The methods and the task.
        own: The settings of single methods by label.

    Returns:
        The configuration, with the objects in place of the names of methods and data.

    Raises:
        InvalidValue: A value is not allowed, or a setting varies the task.
    """
    plan, variants = configuration(table), {}
    for text, variant in plan.variants.items():
        for key in variant.changes:
            if key.startswith(("data.", "model")):
                raise InvalidValue(
                    f"settings.{key}: the task is an object: compare one task after another"
                )
        require_not_own(variant.changes, own, "settings")
        training = {
            own_key(key): getattr(variant.training, own_key(key))
            for key in variant.changes
            if key.startswith("training.")
        }
        variants[text] = replace(variant, objects=objects.trained_with(training), own=dict(own))
    plan = replace(plan, objects=objects, own=dict(own), variants=variants)
    if own:
        of_task = objects.task((plan.seeds or [plan.seed])[0]).training
        for setting in plan.settings.values():
            for name in setting.own:
                single = setting.of(name).objects
                if single is not None:
                    replace(of_task, **single.training)  # raises where they do not fit
    return plan


def labelled(methods: Methods) -> dict[str, Entry]:
    """Return methods by label, by default their expression. Raises as `build`."""
    if isinstance(methods, Mapping):
        return {name: entry_of(method) for name, method in methods.items()}
    listed = (
        methods if isinstance(methods, Sequence) and not isinstance(methods, str) else [methods]
    )
    entries: dict[str, Entry] = {}
    for entry in map(entry_of, listed):
        name = str(entry.algorithm)
        if name in entries and entries[name].settings != entry.settings:
            raise InvalidValue(
                f"two methods are called {quoted(name)}: give labels, such as "
                "{'slow': fl.Entry(...), 'fast': fl.Entry(...)}"
            )
        entries[name] = entry
    return entries


def objects_of(entries: Mapping[str, Entry], task: TaskOf) -> PythonObjects:
    """Return the objects of methods and their task.

    Args:
        entries: Methods with their settings by label.
        task: The task, or a function from a seed to a task.

    Returns:
        The methods by label without their settings (see `own_of`), and the task.
    """
    return PythonObjects({name: entry.algorithm for name, entry in entries.items()}, task)


def own_of(entries: Mapping[str, Entry]) -> dict[str, Own]:
    """Return the settings of the methods that have some."""
    return {name: entry.settings for name, entry in entries.items() if entry.settings}


Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def in_temporary_folder(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Give a function a temporary folder if its `directory` is None.

    The folder is removed with the result of the function, if the function raises an error, or at
    the end of the process.

    Args:
        function: A function with a keyword `directory`, which returns a result with files there.

    Returns:
        The function with the same parameters.
    """

    @functools.wraps(function)
    def called(*positional: Any, directory: Any = None, **named: Any) -> Returned:
        call: Callable[..., Returned] = function
        if directory is not None:
            return call(*positional, directory=directory, **named)
        folder = tempfile.mkdtemp(prefix="fedloom-")
        try:
            result = call(*positional, directory=folder, **named)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
        return result

    return called
