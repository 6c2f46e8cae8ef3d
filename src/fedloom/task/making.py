"""Make a task from names or from your own data and model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.common.device import find_device
from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.training import Training
from fedloom.data.columns import SMALLEST, Dates
from fedloom.data.formats.limits import VARIABLE
from fedloom.data.lazy import LazyInputs
from fedloom.data.noise import LabelNoise, label_noises
from fedloom.data.partition import Partition, build_partition, split_train_test
from fedloom.data.shift import InputShift, shifts
from fedloom.objectives import Objective
from fedloom.task import Task
from fedloom.task.fitting import fitted, in_type_of, mislabelled
from fedloom.task.inputs import dataset_of, initial_module, training_of, with_float_inputs

_ROLES = {"exclude": (), "dates": "refuse", "smallest": SMALLEST}


def make_task(
    data: Any = "digits",
    *,
    target: str = "",
    group: str = "",
    exclude: Sequence[str] = (),
    dates: Dates = "refuse",
    smallest: int = SMALLEST,
    model: str | nn.Module | Callable[..., nn.Module] = "mlp",
    training: Training | Mapping[str, Any] | None = None,
    objective: str | Objective | Callable[..., Any] | None = None,
    metrics: Sequence[str | Callable[..., Any]] = (),
    seed: int = 0,
    device: str = "cpu",
    clients: int = 20,
    partition: str | Partition | Callable[..., Any] | Sequence[Any] = "dirichlet(0.5)",
    local_test: float | None = None,
    merge: bool = False,
    label_noise: str = "none",
    shift: str = "none",
) -> Task:
    """Make a task from names or from your own data and model.

    Args:
        data: The name of a data set, a `Dataset`, `Samples`, a torch data set with a length, a
            table of pandas, Polars or Arrow, or a Hugging Face `Dataset` or `DatasetDict`; or a
            pair of them, for training and test.
        target: The column of a table to learn (`table` reads files and has more options).
        group: The column of a table that names the owner of each row, for `partition="natural"`.
        exclude: Columns of a table that are not learned from, such as the number of a patient.
        dates: Dates of a table are refused, or with `ordinal` numbers of days since 1970-01-01.
        smallest: Fewest training rows of a category of a table with an input of its own. All rarer
            categories of a column are one input, other, and no file of a run holds them.
        model: The expression of a model, such as `mlp(hidden=[64])`; a module, which is copied; or
            a function or class that makes a module, without arguments or from the data's `spec`.
            `seed` draws its weights.
        training: The settings of local training, as a `Training` or a dictionary of its fields.
        objective: The loss and the figures, such as `regression(kind='huber')`, `module:function`
            or a function (outputs, targets) -> the loss of each sample; by default the data set's
            objective.
        metrics: Figures that are recorded beside the objective's: names of torchmetrics with
            options, such as `f1(average='macro')`, `module:function` or functions (outputs,
            targets) -> a number.
        seed: Draws only the partition, the label noise, the shift and the initial weights.
        device: The device of data and models: `cpu`, `cuda`, `cuda:1`, or `auto` for a GPU if the
            machine has one.
        clients: Number of clients.
        partition: How clients share the data: an expression, `module:function`, a function (labels,
            clients, seed, groups) -> the sample indices of each client, these indices as a list of
            arrays, or a `Partition`.
        local_test: The share of each client's samples that it holds out for testing, in (0, 1)
            (FedALA: 0.25).
        merge: Join the training and test part of the data first, as FedALA does; the global test
            set is then the union of the clients' test sets.
        label_noise: Such as `symmetric(0.4)` or `paired([0.0, 0.6])`: makes some of the clients'
            training labels wrong and changes no test data.
        shift: Such as `rotation(45)` or `colour(0.3)`: changes the inputs differently for each
            client, including its test inputs.

    Returns:
        The task.

    Raises:
        InvalidValue: An argument is out of range, or does not fit the data.
        UnknownName: The name is not registered; the text names the most similar one.
    """
    _require_whole("clients", clients)
    _require_whole("seed", seed)
    if not (local_test is None or isinstance(local_test, int | float | np.number)):
        raise InvalidValue(f"local_test must be a number between 0 and 1, not {quoted(local_test)}")
    target_device = find_device(device)
    settings = training if isinstance(training, Training) else training_of(training or {})
    roles = {"exclude": exclude, "dates": dates, "smallest": smallest}
    roles = {name: value for name, value in roles.items() if value != _ROLES[name]}
    dataset = dataset_of(data, target, group, objective, metrics, **roles)
    if isinstance(model, str) and dataset.vocabulary is None:
        dataset = with_float_inputs(dataset)
    noise: LabelNoise | None = label_noises.build_unless_none(label_noise)
    shifted: InputShift | None = shifts.build_unless_none(shift)
    if noise is not None and not dataset.objective.classes:
        raise InvalidValue(
            f"label_noise={label_noise!r}: the targets of {dataset.name} are not classes"
        )
    if isinstance(dataset.train.inputs, LazyInputs) and (merge or shifted is not None):
        option = "merge=true" if merge else f"shift={shift!r}"
        raise InvalidValue(
            f"{option} needs data in memory, and {dataset.name} is read by the clients: set "
            f"{VARIABLE}"
        )
    if merge and local_test is None:
        raise InvalidValue("merge=true leaves no test data: give local_test, such as 0.25")
    pool = dataset.train.concatenate(dataset.test) if merge else dataset.train
    # strata are labels or the objective's substitute; without them `dirichlet` varies the sizes
    strata = dataset.objective.strata(pool.labels)
    labels = torch.zeros(len(pool), dtype=torch.int64) if strata is None else strata.cpu()
    groups = None if pool.groups is None else pool.groups.cpu().numpy()
    partition = build_partition(partition, labels.numpy(), clients, seed, groups)
    train = partition
    tests = None
    test = dataset.test
    if local_test is not None:
        train, tests = split_train_test(partition, seed, local_test)
    module = initial_module(model, dataset.spec, seed)
    dataset, pool, test = fitted(dataset, pool, test, torch.from_numpy(train.indices))
    if shifted is not None:
        pool = shifted.apply(pool, partition, seed)
    if merge and tests is not None:
        test = pool[torch.from_numpy(np.sort(tests.indices))]
    pool, test = (in_type_of(module, samples) for samples in (pool, test))
    task = Task(
        dataset,
        pool,
        test,
        train,
        module,
        settings,
        tests,
        expression=model if isinstance(model, str) else "",
    )
    task = task if noise is None else mislabelled(task, noise, seed)
    return task if target_device.type == "cpu" else task.to(target_device)


def _require_whole(name: str, value: object) -> None:
    """Raise `InvalidValue` unless the value is a whole number of Python or NumPy."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidValue(f"{name} must be a whole number, not {quoted(value)}")
