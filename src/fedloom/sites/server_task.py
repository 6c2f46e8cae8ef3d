"""The task of a federation over sites, on the server."""

from collections.abc import Sequence
from dataclasses import replace

from fedloom.common.errors import InvalidValue
from fedloom.data.dataset import Dataset, make_dataset
from fedloom.data.partition import Partition
from fedloom.data.preprocessing import Preprocessing
from fedloom.runs.configuration import Configuration
from fedloom.sites.site_tables import server_table
from fedloom.task import Task
from fedloom.task.making import make_task


def server_data(configuration: Configuration, agreed: Preprocessing | None = None) -> Dataset:
    """Return the server's data set.

    Args:
        configuration: The configuration of the federation.
        agreed: Preprocessing of the sites' own tables; None for other data.

    Returns:
        The data set. Of tables of the sites, it has only the server's test rows, if there are any.
    """
    if agreed is None:
        return make_dataset(configuration.data.name)
    return server_table(agreed, configuration)


def task_of_sites(
    configuration: Configuration,
    dataset: Dataset,
    samples: Sequence[int],
    tests: Sequence[int] | None,
    seed: int,
) -> Task:
    """Return the task of sites with these numbers of samples.

    Args:
        configuration: The configuration of the federation.
        dataset: The data set; its test set is the global one, on the server.
        samples: Training samples of each site.
        tests: Test samples of each site; None if the sites have no own data.
        seed: Seed of the initial weights.

    Returns:
        The task of the server, without training samples. Its partition has only the numbers of the
        samples.

    Raises:
        InvalidValue: The configuration has a key that needs the data of all sites, or does not fit
            the data set.
    """
    data = configuration.data
    simulated = {
        "merge": data.merge,
        "validation": data.validation is not None,
        "shift": data.shift != "none",
    }
    if tests is not None and any(simulated.values()):
        key = next(key for key, used in simulated.items() if used)
        remedy = "leave it out if sites have their own data"
        raise InvalidValue(f"data.{key} needs all data in one place: {remedy}")
    task = make_task(
        replace(dataset, train=dataset.train[:0]),
        partition=Partition.counted(samples),
        model=configuration.model,
        training=configuration.training,
        objective=configuration.objective,
        metrics=configuration.metrics,
        seed=seed,
    )
    if tests is None or not any(tests):
        return task
    return replace(task, local_test=Partition.counted(tests))
