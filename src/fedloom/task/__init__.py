"""A task: the data, their partition over clients, the model and its local training.

Methods are compared on the same task.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.common.description import Described
from fedloom.common.device import find_device
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream_seed
from fedloom.common.training import Training
from fedloom.data.columns import TableInputs
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition, split_train_test
from fedloom.flat.layout import Layout
from fedloom.models.structure import copied
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION


@dataclass(frozen=True, repr=False)
class Task(Described):
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

    def _description(self) -> dict[str, str]:
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        clients = self.partition.summary("training samples")
        if self.local_test is not None:
            clients += f"; {len(self.local_test.indices):,} test samples"
        noise = {}
        if self.true_labels is not None:
            wrong = int((self.train.labels != self.true_labels).sum())
            noise = {"wrong labels": f"{wrong:,} of {len(self.train):,} training samples"}
        return {
            "data": f"{self.dataset.name}, judged by {self.objective.metric.name}",
            "clients": clients,
            "test set": self.test.summary(),
            "model": f"{self.expression or type(self.model).__name__}, {weights:,} weights",
            "training": self.training.summary(),
            **noise,
        }

    @property
    def objective(self) -> Objective:
        """The loss, and the figures that evaluate models."""
        return self.dataset.objective

    @property
    def notices(self) -> list[str]:
        """The notices of the data set, and one if integers of a table became classes by default."""
        dataset = self.dataset
        names = self.dataset.class_names or ()
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

    @cached_property
    def client_names(self) -> tuple[str, ...] | None:
        """The names of the clients in the data, in the order of their numbers.

        A client has the name of the group of its samples. None if a group is not one client.
        """
        groups = self.train.groups
        texts = self.train.group_names
        if self.elsewhere or groups is None or texts is None:
            return None
        owned = groups.cpu().numpy()[self.partition.indices]
        first = owned[self.partition.offsets[:-1]]
        is_one_group = np.array_equal(np.repeat(first, self.partition.sizes), owned)
        if not is_one_group or len(np.unique(first)) < len(first):
            return None
        return tuple(texts[group] for group in first.tolist())

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


def withhold(task: Task, share: float, seed: int) -> Task:
    """Return the task with `share` of each client's training samples as its only test data.

    Each client has at least one sample left to train on. It tests on its own held-out samples if it
    had test samples before. Held-out samples have their true labels.

    Args:
        task: The task to split.
        share: Share of the samples to hold out, in (0, 1).
        seed: Draws the held-out samples.

    Returns:
        A copy of the task. The partition has the remaining training samples, and `test` has the
        held-out samples in the order of the data.

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
