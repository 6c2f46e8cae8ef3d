"""A small task with unequal clients and local test data, and a method with client memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedloom.algorithm.records import Message
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.local.cohort import Cohort
from fedloom.task import Task

CLASSES = 4
TRAIN_SIZES = (9, 5, 12, 7, 3, 8)
TEST_SIZES = (4, 1, 6, 0, 2, 3)


class SmallNet(nn.Module):
    """A network with dropout, which draws torch's random numbers.

    By default it has batch norm: statistics and integer buffers.
    """

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(self.drop(torch.relu(self.norm(self.hidden(inputs)))))
        return logits


def small_task(own_test: bool = True, norm: bool = True) -> Task:
    """Return a task of six clients.

    The samples of client i follow those for client i - 1, first all training samples, then all test
    samples.
    """
    generator = torch.Generator().manual_seed(5)
    count = sum(TRAIN_SIZES) + sum(TEST_SIZES)
    inputs = torch.randn(count + 20, 5, generator=generator)
    labels = (
        inputs[:, :CLASSES] + 0.3 * torch.randn(count + 20, CLASSES, generator=generator)
    ).argmax(1)
    everything = Samples(inputs, labels)
    order = torch.arange(count).numpy()
    dataset = Dataset("small", everything[:count], everything[count:], CLASSES)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = SmallNet(norm)
    return Task(
        dataset,
        dataset.train,
        dataset.test,
        Partition.from_sizes(order[: sum(TRAIN_SIZES)], TRAIN_SIZES),
        model,
        Training(learning_rate=0.2, batch_size=4),
        Partition.from_sizes(order[sum(TRAIN_SIZES) :], TEST_SIZES) if own_test else None,
    )


class KeepsClientMemory(FedAvg):
    """FedAvg with a client memory: each client stores its last model.

    It trains from the mean of this model and the download, and would train once more for use.
    """

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        trained = cohort.fit((inbox["model"] + cohort.memory.get("mine", inbox["model"])) / 2).model
        cohort.memory["mine"] = trained
        cohort.memory["rounds"] = cohort.memory.get("rounds", torch.zeros(1, dtype=torch.int64)) + 1
        return {"model": trained}

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        return self.train(cohort, inbox)["model"]


def other_notices(notices: Iterable[str]) -> list[str]:
    """Return the notices except for the last batches of one sample.

    Two clients have such a batch, and batch norm skips it.
    """
    return [text for text in notices if "skip the last sample" not in text]
