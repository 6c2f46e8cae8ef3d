"""A few clients for the comparison of fedloom's methods with naive ones.

Used by `naive` and `naive_personal`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.task import Task

FEATURES = 5


@dataclass
class SmallWorld:
    """Unequal clients with random data in float64 and their training settings.

    Subclasses choose labels and model.
    """

    norm: bool = False
    rounds: int = 4
    participation: float = 0.5
    seed: int = 3
    sizes: tuple[int, ...] = ()
    training: Training = field(
        default_factory=lambda: Training(
            learning_rate=0.1,
            momentum=0.5,
            weight_decay=1e-2,
            decay=0.9,
            epochs=2,
            batch_size=4,
            clip=1.5,
        )
    )

    classes: ClassVar[int]

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.clients = len(self.sizes)
        self.inputs = torch.randn(
            sum(self.sizes), FEATURES, dtype=torch.float64, generator=generator
        )
        starts = [sum(self.sizes[:k]) for k in range(self.clients)]
        self.owned = [
            list(range(start, start + size)) for start, size in zip(starts, self.sizes, strict=True)
        ]
        self.labels = self.draw_labels(generator)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.module = self.make_net().double()

    def draw_labels(self, generator: torch.Generator) -> Tensor:
        """Draw the label of every sample."""
        raise NotImplementedError

    def make_net(self) -> nn.Module:
        """Build the model, with initial weights from torch's generator."""
        raise NotImplementedError

    def task(self) -> Task:
        """Return this world as a task of fedloom."""
        samples = Samples(self.inputs, self.labels)
        data = Dataset("random", samples, samples, self.classes)
        return Task(
            data,
            samples,
            samples,
            Partition.of(self.owned),
            copy.deepcopy(self.module),
            self.training,
        )

    def rate(self, number: int) -> float:
        """Return the learning rate of a round."""
        return self.training.learning_rate * self.training.decay ** (number - 1)

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's samples and labels."""
        return self.inputs[self.owned[client]], self.labels[self.owned[client]]
