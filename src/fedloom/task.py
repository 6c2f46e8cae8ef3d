"""A task: the data, their partition over clients, the model and its local training.

Methods are compared on the same task.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.config.expression import Call
from fedloom.config.registry import Entry
from fedloom.data.columns import Moments, TableInputs
from fedloom.data.convert import require_finite
from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.limits import VARIABLE
from fedloom.data.lazy import LazyInputs
from fedloom.data.noise import LabelNoise, label_noises
from fedloom.data.partition import Partition, build_partition, split_train_test
from fedloom.data.shift import InputShift, shifts
from fedloom.errors import InvalidValue, quoted
from fedloom.flat.device import find_device
from fedloom.flat.layout import Layout, require_copyable
from fedloom.models.build import build_model
from fedloom.models.structure import copied, unwrapped
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.custom import build_objective
from fedloom.objectives.metrics import build_metrics
from fedloom.objectives.regression import Regression, Standardised
from fedloom.randomness import stream_seed
from fedloom.training import Training


@dataclass(frozen=True)
class Task:
    """The data, their partition over clients, the model and its local training, for any method.

    Attributes:
        dataset: The data set with its objective and metrics.
        train: The samples of all clients; empty on the server of real sites, where the partitions
            only count samples.
        test: The global test set.
        partition: The indices in `train` of each client's training samples.
        model: The initial model.
        training: The settings of local training.
        local_test: The indices in `train` of each client's test samples, distributed as its
            training samples are.
        true_labels: With label noise, the true labels; the labels of `train` are partly wrong.
        expression: The expression that built the model; empty for the user's module.
    """

    dataset: Dataset
    train: Samples
    test: Samples
    partition: Partition
    model: nn.Module
    training: Training = field(default_factory=Training)
    local_test: Partition | None = None
    true_labels: Tensor | None = None
    expression: str = ""

    def __post_init__(self) -> None:
        empty = int((self.partition.sizes == 0).sum())
        if empty:
            raise InvalidValue(
                f"{empty} of {self.clients} clients have no sample: take fewer or a larger minimum"
            )

    @property
    def objective(self) -> Objective:
        """The loss, and the figures that evaluate models."""
        return self.dataset.objective

    @property
    def notices(self) -> list[str]:
        """The notices of the data set, and one if integers of a table became classes by default."""
        dataset, names = self.dataset, self.dataset.class_names or ()
        table = dataset.objective is CLASSIFICATION and isinstance(dataset.encoding, TableInputs)
        text = (
            f"the {dataset.classes} whole numbers of the column {dataset.target!r} "
            "are taken as classes: "
        )
        remedy = "objective='regression' (of a file, table(kind=regression)) takes them as numbers"
        is_guessed = table and dataset.classes > 2 and dataset.label_type == "number"
        is_guessed = is_guessed and all(map(str.isdecimal, names))
        return [*dataset.notices, *([text + remedy] if is_guessed else [])]

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.partition)

    @property
    def elsewhere(self) -> bool:
        """Return True if the clients' samples are at remote sites."""
        return self.partition.elsewhere

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.model)

    @cached_property
    def initial(self) -> Tensor:
        """The initial model as a row `[P]`."""
        return self.layout.flatten(self.model)

    @cached_property
    def initial_integers(self) -> Tensor:
        """The initial model's integer buffers."""
        return self.layout.flatten_integers(self.model)

    def sizes(self, clients: Tensor) -> Tensor:
        """Return the numbers of training samples of clients.

        Args:
            clients: Numbers of clients, `[k]` int64.

        Returns:
            `[k]` int64.
        """
        index = clients.numpy()
        offsets = self.partition.offsets
        return torch.from_numpy(offsets[index + 1] - offsets[index])

    def samples(self, client: int) -> Samples:
        """Return the training samples of a client."""
        start, stop = self.partition.offsets[client : client + 2].tolist()
        return self.train[self._indices[start:stop]]

    @cached_property
    def _indices(self) -> Tensor:
        """All clients' indices on the data's device, so that selecting samples copies no index."""
        return torch.from_numpy(self.partition.indices).to(self.train.labels.device)

    def module(self, row: Tensor) -> nn.Module:
        """Return a new module with the weights of `row [P]`."""
        module = copied(self.model)
        self.layout.load(module, row)
        return module

    def to(self, device: torch.device | str) -> "Task":
        """Return the task with data, model and the clients' memory on a device.

        Args:
            device: Such as `"cuda"`, or `"auto"` for a GPU if the machine has one.

        Raises:
            InvalidValue: The device does not exist.
        """
        target = find_device(device) if isinstance(device, str) else device
        return replace(
            self,
            train=self.train.to(target),
            test=self.test.to(target),
            model=copied(self.model).to(target),
            true_labels=None if self.true_labels is None else self.true_labels.to(target),
        )


def make_dataset(expression: str | Call) -> Dataset:
    """Return the data set of an expression such as `digits` or `synthetic(1, 1)`."""
    return cast(Dataset, datasets.build(expression))


def make_task(
    data: Any = "digits",
    *,
    target: str = "",
    group: str = "",
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
    settings = training if isinstance(training, Training) else _training(training or {})
    dataset = _dataset(
        data, target, group, None if objective is None else build_objective(objective, metrics)
    )
    if isinstance(model, str) and dataset.vocabulary is None:
        dataset = _with_float_inputs(dataset)
    if metrics:
        dataset = replace(
            dataset, metrics=build_metrics(metrics, dataset.objective, dataset.spec.outputs)
        )
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
    train, tests, test = partition, None, dataset.test
    if local_test is not None:
        train, tests = split_train_test(partition, seed, local_test)
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        require_copyable(model)
        module = copied(model)
    else:
        module = unwrapped(build_model(model, dataset.spec, seed))
    dataset, pool, test = _fitted(dataset, pool, test, torch.from_numpy(train.indices))
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


def _dataset(data: Any, target: str, group: str, objective: Objective | None) -> Dataset:
    """Return the data set of a name or of the user's data, with `objective` if it is set."""
    if not isinstance(data, str | Dataset):
        # with Arrow, which takes a while to load
        from fedloom.data.sets.foreign import foreign_dataset

        dataset = foreign_dataset(data, target, group, objective)
    elif target or group:
        raise InvalidValue(
            "target and group name columns of a table: in the name of a data set, as "
            "table(target=...)"
        )
    else:
        dataset = make_dataset(data) if isinstance(data, str) else data
    return dataset if objective is None else replace(dataset, objective=objective)


def _with_float_inputs(dataset: Dataset) -> Dataset:
    """Return the data set with whole numbers as float32, unless they are tokens of a vocabulary."""
    if isinstance(dataset.train.inputs, LazyInputs) or dataset.train.inputs.dtype != torch.int64:
        return dataset
    train, test = (
        replace(samples, inputs=samples.inputs.to(torch.float32))
        for samples in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test)


def _training(options: Mapping[str, Any]) -> Training:
    if not isinstance(options, Mapping):
        raise InvalidValue(
            f"training must be a Training or a dictionary of its fields, not {quoted(options)}"
        )
    return Training(**Entry("training", Training).options((), {**options}))


def _fitted(
    dataset: Dataset, pool: Samples, test: Samples, rows: Tensor
) -> tuple[Dataset, Samples, Samples]:
    """Fit the preprocessing to the `rows` of `pool` that clients train on; apply it everywhere."""
    encoding, objective = dataset.encoding, dataset.objective
    if isinstance(encoding, TableInputs):
        if not encoding.is_fitted and len(rows):
            encoding = encoding.fitted(Moments.of(pool.inputs[rows]))
        dataset = replace(dataset, encoding=encoding)
        if encoding.is_fitted:
            pool, test = (
                replace(samples, inputs=encoding.scaled(samples.inputs)) for samples in (pool, test)
            )
    if type(objective) is Regression and dataset.standardise and len(rows):
        moments = Moments.of(pool.labels[rows].reshape(len(rows), -1))
        mean, deviation = (tuple(values.tolist()) for values in (moments.mean, moments.deviation))
        scaled = Standardised(objective.kind, objective.delta, mean, deviation)
        pool, test = (
            replace(samples, labels=scaled.standardised(samples.labels)) for samples in (pool, test)
        )
        dataset = replace(dataset, objective=scaled)
    return dataset, pool, test


def in_type_of(model: nn.Module, samples: Samples) -> Samples:
    """Return the samples with float64 inputs converted to a type of the model's parameters.

    Raises:
        InvalidValue: An input is NaN or infinite.
    """
    if isinstance(samples.inputs, LazyInputs) or not samples.inputs.is_floating_point():
        return samples
    require_finite(samples.inputs, "inputs")
    types = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    if samples.inputs.dtype != torch.float64 or torch.float64 in types or not types:
        return samples
    return replace(samples, inputs=samples.inputs.to(types[0]))


def mislabelled(task: Task, noise: LabelNoise, seed: int) -> Task:
    """Return the task with label noise in the clients' training samples.

    All test samples have their true labels.

    Args:
        task: The task.
        noise: The label noise.
        seed: Draws the noise.
    """
    labels = task.train.labels
    noisy = noise.apply(labels.cpu().numpy(), task.partition, task.dataset.classes, seed)
    train = replace(task.train, labels=torch.from_numpy(noisy).to(labels.device))
    return replace(task, train=train, true_labels=labels)


def withhold(task: Task, share: float, seed: int) -> Task:
    """Return the task with `share` of each client's training samples as its only test data.

    Each client has at least one sample left to train on. It tests on its own held-out samples if it
    had test samples before. Held-out samples have their true labels.

    Args:
        task: The task to split.
        share: Share of the samples to hold out, in (0, 1).
        seed: Draws the held-out samples.

    Raises:
        InvalidValue: `share` is out of range, or every client has a single sample.
    """
    training, validation = split_train_test(
        task.partition, stream_seed(seed, "validation split"), share
    )
    if not len(validation.indices):
        raise InvalidValue(
            "no client has two training samples, so none can be held out for validation"
        )
    index = torch.from_numpy(np.sort(validation.indices)).to(task.train.labels.device)
    local_test = None if task.local_test is None else validation
    train = task.train
    if task.true_labels is not None:
        labels = train.labels.clone()
        labels[index] = task.true_labels[index]
        train = replace(train, labels=labels)
    return replace(task, train=train, test=train[index], partition=training, local_test=local_test)
