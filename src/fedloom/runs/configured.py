"""Runs from a configuration, each in its directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedloom.common.plugins import import_plugins
from fedloom.report import summary as figures
from fedloom.report.summary import RunSummary
from fedloom.rounds.engine import Engine
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import (
    RunDirectory,
    folder_name,
    locked,
    setting_folder,
)
from fedloom.runs.entry import named
from fedloom.runs.events import Event, RunName, Watch
from fedloom.runs.run_plan import RunPlan
from fedloom.state.files import remove_unfinished
from fedloom.task import Task


def run_directory(
    configuration: Configuration, algorithm: str, seed: int, setting: str = ""
) -> RunDirectory:
    """Return the directory of a configured run, in the folders of its setting and its method.

    Args:
        configuration: The configuration, with the folder of the experiment.
        algorithm: Label or expression of the method.
        seed: Seed of the run.
        setting: Label of the setting, or "" without settings.

    Returns:
        The directory, `FOLDER/SETTING/METHOD/seed-N`. It is not created.
    """
    folder = setting_folder(configuration.folder, setting)
    name = algorithm if configuration.labelled(algorithm) else str(configuration.method(algorithm))
    name = named(name, configuration.choices(algorithm))
    return RunDirectory(folder / folder_name(name) / f"seed-{seed}")


def run_configured(
    configuration: Configuration,
    name: RunName,
    watch: Watch,
    *,
    fresh: bool = False,
    make_task: Callable[[int], Task] | None = None,
    path: Path | None = None,
    engine: Callable[[Task], Engine] | None = None,
    alone: bool = True,
) -> RunSummary:
    """Make a run, continue it, or read it if it is finished.

    Args:
        configuration: The configuration.
        name: Name of the run.
        watch: Called with every event. An exception stops the run after the round.
        fresh: Start again.
        make_task: Makes the task of a seed; by default as configured.
        path: Directory of the run; by default as configured.
        engine: Makes the engine; by default as configured.
        alone: False if other runs share the cores.

    Returns:
        The figures.

    Raises:
        InvalidValue: The configuration does not fit the task.
        CheckpointError: The directory holds another run, or a damaged one.
        Diverged: No client's model is finite any more.
    """
    import_plugins(configuration.plugins)  # in worker processes too
    configuration = configuration.of(name.algorithm)
    directory = run_directory(configuration, *name) if path is None else RunDirectory(path)
    with locked(directory.lock):
        remove_unfinished(directory.path)
        trackers = configuration.trackers
        plan = RunPlan(
            configuration, name, watch, directory, fresh, trackers, make_task, engine, alone
        )
        if not fresh:
            if directory.finished:
                directory.require(plan.resolved, plan.method)
            if directory.ended(plan.resolved):
                summary = directory.summary(name.algorithm)
                watch(Event("skipped", name, configuration.rounds))
                return summary
        result = plan.execute()
        provenance = directory.provenance(None if result.engine.named else result.engine)
        environment = result.summary.environment | provenance
        summary = replace(result.summary, algorithm=name.algorithm, environment=environment)
    seconds = figures.seconds(summary) or 0.0
    last = summary.records[-1]
    watch(Event("ended", name, last["round"], last, seconds, metric=summary.metric))
    return summary
