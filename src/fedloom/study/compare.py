"""Compare methods in Python."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedloom.runs.progress import bars, progress
from fedloom.runs.python_objects import TaskOf
from fedloom.study.comparison import Comparison
from fedloom.study.comparison_result import ComparisonResult
from fedloom.study.python_runs import (
    Methods,
    in_temporary_folder,
    labelled,
    objects_of,
    own_of,
    python_configuration,
    python_table,
)
from fedloom.study.tuned_comparison import tune_methods


@in_temporary_folder
def compare(
    methods: Methods,
    task: TaskOf,
    *,
    seeds: Iterable[int] = (0,),
    directory: str | Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
    tune: Mapping[str, Any] | None = None,
    trials: int | None = None,
    **options: Any,
) -> ComparisonResult:
    """Compare methods over several seeds, as `fedloom compare` does: a few runs at a time, resumed,
    tested in pairs.

    Args:
        methods: Methods by label, such as `{"FedAvg": "fedavg", "mine": Mine(step=0.5)}`, or a list
            of them. An `Entry` or the result of `fl.tune` has its own settings of the training and
            the schedule.
        task: The task, with the same data, split and initial model for every seed; or a function
            from a seed to a task, which draws these anew.
        seeds: The seeds, such as `range(5)`. More of them later repeat nothing.
        directory: Folder of the runs. The same call continues where it was interrupted and reads
            finished runs; with more `rounds` it lengthens them. By default a folder that is removed
            with the result.
        fresh: Start all runs again.
        quiet: Show no progress.
        tune: Values by key, as for `fl.tune`, such as `{"training.learning_rate": [0.01, 0.1]}`.
            Each method is first tuned by itself on samples that are held out of its clients'
            training data, then compared with its best settings. A key that only some methods have
            is searched for these.
        trials: The number of trials of each method, drawn at random from larger grids. Needed when
            grids have different sizes, so that each method has the same budget.
        **options: Fields of the `Schedule`, such as `rounds=50`, and other keys of a configuration,
            such as `targets`. `settings={"participation": [0.1, 0.5]}` compares in several
            settings.

    Returns:
        The runs as tables, frames, figures and tests. What failed is in `failed`.

    Raises:
        InvalidValue: An argument is out of range, or a method does not fit the task.
        CheckpointError: The folder holds another comparison, or a damaged run.
    """
    entries = labelled(methods)
    objects = objects_of(entries, task)
    table = python_table(objects, seeds, directory, options)
    plan = python_configuration(table, objects, own_of(entries))
    if tune is not None:
        plan = tune_methods(table, plan, tune, trials, lambda title, rounds: bars(rounds, quiet))
    comparison = Comparison.of(plan).side_by_side
    with progress(len(comparison.names), comparison.rounds, quiet) as watch:
        failed = comparison.run(watch, fresh=fresh)
    return comparison.result(failed)
