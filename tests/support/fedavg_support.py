"""A task and federations of FedAvg."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fedloom.algorithm import Algorithm
from fedloom.data import Dataset, Samples
from fedloom.engines.rows import RowsEngine
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task


class Small(nn.Module):
    """A convolution, batch norm with an integer counter, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(F.max_pool2d(F.relu(self.norm(self.conv(inputs))), 2).flatten(1))


def small_task(**training: object) -> Task:
    """Return a task with six clients of unequal size; one last batch is a single sample."""
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(120, 1, 6, 6, generator=draw)
    labels = torch.randint(3, (120,), generator=draw)
    samples = Samples(inputs, labels)
    torch.manual_seed(3)
    settings = {"learning_rate": 0.1, "batch_size": 8, "epochs": 2, **training}
    return make_task(
        Dataset("noise", samples, samples[:30], 3),
        clients=6,
        partition="lognormal(0.6)",
        model=Small(),
        training=settings,
    )


def federation(algorithm: Algorithm, task: Task, rounds: int, **schedule: object) -> Federation:
    options = {"participation": 0.5, "seed": 4, **schedule}
    return Federation(algorithm, task, RowsEngine(task), Schedule(rounds=rounds, **options))  # type: ignore[arg-type]
