"""A small, reproducible task for each objective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.data.dataset import Dataset, Samples
from fedloom.objectives import Objective
from fedloom.objectives.classification import Classification
from fedloom.objectives.custom import Custom
from fedloom.objectives.multilabel import Multilabel
from fedloom.objectives.regression import Regression
from fedloom.objectives.sequence import NextToken, Segmentation

SAMPLES = 48


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean absolute error of each sample, as a user's loss."""
    return (outputs - targets).abs().mean(1)


def median_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """A user metric that is not additive over samples."""
    return (outputs[:, 0] - targets[:, 0]).abs().median()


class Tokens(nn.Module):
    """Logits of the next of five tokens at each position, from the token at this position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.table(tokens))}


class Pixels(nn.Module):
    """Logits of three classes for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first(images).relu())
        return logits


def draw(kind: str) -> tuple[Samples, nn.Module, Objective, int]:
    """Return reproducible samples, a model, the objective and the number of classes of one kind."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return _draw(kind)


def _draw(kind: str) -> tuple[Samples, nn.Module, Objective, int]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(SAMPLES, 4, generator=generator)
    linear = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    if kind == "classification":
        labels = torch.randint(3, (SAMPLES,), generator=generator)
        return Samples(features, labels), linear, Classification(0.1, (1.0, 2.0, 0.5), 2), 3
    if kind == "multilabel":
        targets = (torch.rand(SAMPLES, 3, generator=generator) < 0.4).float()
        return Samples(features, targets), linear, Multilabel(), 0
    if kind == "sequence":
        tokens = torch.randint(5, (SAMPLES, 7), generator=generator)
        targets = torch.randint(5, (SAMPLES, 7), generator=generator)
        targets[:, 5:][torch.rand(SAMPLES, 2, generator=generator) < 0.5] = -100
        return Samples(tokens, targets), Tokens(), NextToken(), 0
    if kind == "segmentation":
        masks = torch.randint(3, (SAMPLES, 5, 5), generator=generator)
        masks[torch.rand(masks.shape, generator=generator) < 0.1] = 255
        return (
            Samples(torch.randn(SAMPLES, 1, 5, 5, generator=generator), masks),
            Pixels(),
            Segmentation(),
            3,
        )
    targets = torch.randn(SAMPLES, 3, generator=generator)
    objective = Custom(absolute) if kind == "custom" else Regression(kind)  # type: ignore[arg-type]
    return Samples(features, targets), linear, objective, 0


KINDS = (
    "classification",
    "multilabel",
    "sequence",
    "segmentation",
    "squared",
    "absolute",
    "huber",
    "custom",
)


def make(kind: str, **options: Any) -> fl.Task:
    samples, model, objective, classes = draw(kind)
    vocabulary = 5 if kind == "sequence" else None
    data = Dataset(
        kind, samples[:36], samples[36:], classes, vocabulary=vocabulary, objective=objective
    )
    training = fl.Training(learning_rate=0.1, momentum=0.5, batch_size=5, epochs=2)
    return fl.make_task(data, clients=3, partition="iid", model=model, training=training, **options)
