"""How good a model is on given samples, in all or client by client."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.flat.layout import Layout
from fedloom.local.cohort import judged

WORST = 0.1
"""Share of the clients, those with the lowest accuracy, whose mean is called the worst."""


class Score(NamedTuple):
    """Share of samples classified right, mean cross entropy, number of samples."""

    accuracy: float
    loss: float
    samples: int


@dataclass(frozen=True)
class Tally:
    """Scores of n clients on their own test samples: the clients' numbers, how many samples were classified right, the sum of
    the cross entropy (float64), and how many samples there are, `[n]` each."""

    clients: Tensor
    correct: Tensor
    loss: Tensor
    samples: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Tally]) -> Tally:
        """All parts as one, ordered by the clients' numbers."""
        if not parts:
            nothing = torch.empty(0, dtype=torch.int64)
            return cls(nothing, nothing, nothing.double(), nothing)
        clients = torch.cat([part.clients for part in parts])
        order = clients.argsort()
        return cls(
            clients[order],
            torch.cat([part.correct for part in parts])[order],
            torch.cat([part.loss for part in parts])[order],
            torch.cat([part.samples for part in parts])[order],
        )

    @property
    def accuracy(self) -> Tensor:
        """Share of each client's samples that were classified right, `[n]` float64."""
        return self.correct.double() / self.samples

    def figures(self, name: str) -> dict[str, float]:
        """The summary of these clients under `name`.

        `_accuracy`: over all their samples, so the mean weighted by samples; `_loss`: likewise. `_accuracy_std`: the
        population standard deviation of the clients' accuracies, and `_accuracy_worst` the mean over the tenth of the clients
        (at least one) with the lowest accuracy, both with every client counted alike.
        Source: FedALA, section 5.1, and its authors' code for the weighted mean and the deviation.
        """
        total = int(self.samples.sum())
        lowest = self.accuracy.sort().values[: math.ceil(WORST * len(self.clients))]
        return {
            f"{name}_accuracy": int(self.correct.sum()) / total,
            f"{name}_accuracy_std": float(self.accuracy.std(correction=0)),
            f"{name}_accuracy_worst": float(lowest.mean()),
            f"{name}_loss": float(self.loss.sum()) / total,
        }


class Evaluator:
    """Scores rows on samples through one module in evaluation mode; statistics and random streams stay untouched."""

    def __init__(self, module: nn.Module, layout: Layout, dataset: Dataset, batch_size: int = 500) -> None:
        self._original = module
        self.layout = layout
        self.dataset = dataset
        self.batch_size = batch_size

    @cached_property
    def module(self) -> nn.Module:
        """The module, copied when it is first needed, since most engines score no model."""
        return copy.deepcopy(self._original).eval().requires_grad_(False)

    def score(self, row: Tensor, samples: Samples, integers: Tensor | None = None) -> Score:
        """The score of the model `row [P]` on all samples together."""
        correct, loss = self._judge(row, samples, None, integers)
        return Score(int(correct.sum()) / len(samples), float(loss.sum()) / len(samples), len(samples))

    def tally(
        self, row: Tensor, samples: Samples, own: Partition, clients: Sequence[int], integers: Tensor | None = None
    ) -> Tally:
        """Scores of one model `row [P]` on the samples that `own` assigns to each of `clients`.

        Clients share batches, so that many small test sets cost no more than one large one.
        """
        index = np.concatenate([own[client] for client in clients])
        sizes = np.array([len(own[client]) for client in clients])
        owner = np.repeat(np.arange(len(clients)), sizes)
        correct, loss = self._judge(row, samples, torch.from_numpy(index), integers)
        # Summed here in one fixed order: adding up on a GPU would not be the same twice.
        hits = np.bincount(owner, weights=correct.cpu().numpy(), minlength=len(clients)).astype(np.int64)
        losses = np.bincount(owner, weights=loss.cpu().numpy(), minlength=len(clients))
        return Tally(torch.tensor(clients), torch.from_numpy(hits), torch.from_numpy(losses), torch.from_numpy(sizes))

    def _judge(
        self, row: Tensor, samples: Samples, index: Tensor | None, integers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Whether each sample (of `index`, or of all) is classified right, and its cross entropy as float64."""
        # Into tensors of its own, not by binding: how numbers lie in memory moves the last digits of products.
        self.layout.load(self.module, row, integers)
        return judged(self.module, self.dataset, samples, index, self.batch_size)
