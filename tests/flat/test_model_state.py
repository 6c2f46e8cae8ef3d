"""Models with state: buffers assigned in the forward pass, and state shared between clients."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedloom as fl
from batch_order import batch_order
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task


class Assigned(nn.Module):
    """Subtracts a moving mean and counts batches, and assigns new tensors for both."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        inputs = images.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
            self.count = self.count + 1
        logits: Tensor = self.out(inputs - self.mean)
        return logits


class Attribute(nn.Module):
    """Stores the mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)
        self.mean: Any = 0.0

    def forward(self, images: Tensor) -> Tensor:
        inputs = images.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        logits: Tensor = self.out(inputs - self.mean)
        return logits


class Drawing(nn.Module):
    """Uses random numbers from a generator outside torch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.out, self.draw = nn.Linear(64, 10), draw

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.out(images.flatten(1) + self.draw())
        return logits


def digits(module: nn.Module) -> Task:
    training = Training(learning_rate=0.1, batch_size=32)
    return fl.make_task("digits", model=module, clients=3, partition="iid", training=training)


@pytest.mark.parametrize("engine", [RowsEngine, StackedEngine])
def test_buffers_that_are_assigned_anew_are_those_of_plain_pytorch(
    engine: type[RowsEngine],
) -> None:
    task = digits(Assigned())
    federation = Federation(build("fedavg"), task, engine(task), Schedule(1, 1.0, 3))
    federation.run()
    expected, counts = torch.zeros_like(task.initial), 0
    for client in range(3):
        module, samples = copy.deepcopy(task.model).train(), task.samples(client)
        order = batch_order(
            len(samples), stream(3, "batches", round=1, client=client), batch_size=32
        )
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for index in order:
            optimizer.zero_grad()
            inputs = task.dataset.prepare(samples.inputs[index])
            F.cross_entropy(module(inputs), samples.labels[index]).backward()
            optimizer.step()
            counts += 1
        expected += task.layout.flatten(module) * len(samples) / len(task.train)
    torch.testing.assert_close(federation.model(), expected, rtol=1e-4, atol=1e-6)
    assert federation.model()[-64:].abs().max() > 0.1
    assert counts // 3 - 1 <= int(federation.integers) <= counts // 3 + 1


@pytest.mark.parametrize("engine", ["rows", "stacked", "default"])
@pytest.mark.parametrize(
    "module",
    [Attribute(), Drawing(random.random), Drawing(lambda: float(np.random.rand()))],
    ids=["attribute", "random", "numpy"],
)
def test_state_that_clients_would_share_is_refused(module: nn.Module, engine: str) -> None:
    with pytest.raises(InvalidValue, match=r"differ from plain PyTorch.*register_buffer"):
        fl.run("fedavg", digits(module), rounds=1, engine=engine, quiet=True)
