"""How good a model is on given samples."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.data.dataset import Dataset, Samples
from fedloom.layout import Layout


class Score(NamedTuple):
    """Share of samples classified right, mean cross entropy, number of samples."""

    accuracy: float
    loss: float
    samples: int


class Evaluator:
    """Scores rows on samples through one module in evaluation mode; statistics and random streams stay untouched."""

    def __init__(self, module: nn.Module, layout: Layout, dataset: Dataset, batch_size: int = 500) -> None:
        self.module = copy.deepcopy(module).eval().requires_grad_(False)
        self.layout = layout
        self.dataset = dataset
        self.batch_size = batch_size

    @torch.no_grad()
    def score(self, row: Tensor, samples: Samples, integers: Tensor | None = None) -> Score:
        """The score of the model `row [P]`."""
        self.layout.load(self.module, row, integers)
        correct = torch.zeros((), dtype=torch.int64, device=row.device)
        loss = torch.zeros((), dtype=torch.float64, device=row.device)
        for start in range(0, len(samples), self.batch_size):
            batch = samples[start : start + self.batch_size]
            logits = self.module(self.dataset.prepare(batch.inputs))
            correct += (logits.argmax(1) == batch.labels).sum()
            loss += F.cross_entropy(logits, batch.labels, reduction="sum")
        return Score(int(correct) / len(samples), float(loss) / len(samples), len(samples))
