"""How good a model is on given samples, in all or client by client."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.flat.intact import IntactInputs
from fedloom.flat.layout import Layout
from fedloom.objectives import Objective, prediction
from fedloom.objectives.metrics import counted, figures
from fedloom.randomness import global_stream

WORST = 0.1
"""Share of the clients, those that the metric finds worst, whose mean is recorded too."""


@dataclass(frozen=True)
class Tally:
    """Sums `[n, ...]` by name of what the objective counts on the test `samples [n]` of n `clients
    [n]`.
    """

    clients: Tensor
    samples: Tensor
    totals: dict[str, Tensor]

    @classmethod
    def joined(cls, tallies: "Sequence[Tally]") -> "Tally":
        """Return all tallies as one, ordered by the clients' numbers."""
        if not tallies:
            nothing = torch.empty(0, dtype=torch.int64)
            return cls(nothing, nothing, {})
        clients = torch.cat([tally.clients for tally in tallies])
        order = clients.argsort()
        totals = {
            name: torch.cat([tally.totals[name] for tally in tallies])[order]
            for name in tallies[0].totals
        }
        return cls(clients[order], torch.cat([tally.samples for tally in tallies])[order], totals)

    def each(self, objective: Objective) -> dict[str, Tensor]:
        """The objective's figures of every client, `[n]` float64 by name."""
        return figures(objective, {**self.totals, "samples": self.samples.double()})

    def overall(self, objective: Objective) -> dict[str, float]:
        """The objective's figures over all samples of all clients."""
        counts = {**self.totals, "samples": self.samples.double()}
        totals = objective.add_up(counts, lambda values: values.sum(0, keepdim=True))
        return {name: float(value) for name, value in figures(objective, totals).items()}

    def figures(self, name: str, objective: Objective) -> dict[str, float]:
        """The summary of these clients under `name`.

        `_accuracy` (or whatever the metric is) and the other figures: over all their samples, so
        means weighted by samples. `_accuracy_std`: the population standard deviation of the
        clients' accuracies, and `_accuracy_worst` the mean over the tenth of the clients (at least
        one) with the worst accuracy, both with every client counted alike.
        Source: FedALA, section 5.1, and its authors' code for the weighted mean and the deviation.
        """
        metric = objective.metric
        values = self.each(objective)[metric.name]
        worst = values.sort(descending=not metric.higher_is_better).values[
            : math.ceil(WORST * len(self.clients))
        ]
        overall = self.overall(objective)
        leading = {metric.name: overall.pop(metric.name), f"{metric.name}_std": float(values.std(correction=0)),
                   f"{metric.name}_worst": float(worst.mean())}  # fmt: skip
        return {f"{name}_{figure}": value for figure, value in (leading | overall).items()}


class Evaluator:
    """Scores rows on samples through one module in evaluation mode; statistics and random streams
    stay untouched.
    """

    batch_size = 500

    def __init__(self, module: nn.Module, layout: Layout, dataset: Dataset) -> None:
        self._original, self.layout, self.dataset = module, layout, dataset
        self._inputs, self._labels = IntactInputs(), IntactInputs()

    @cached_property
    def module(self) -> nn.Module:
        """The module, copied when it is first needed, since most engines score no model."""
        return self.layout.copy(self._original).eval().requires_grad_(False)

    def score(
        self, row: Tensor, samples: Samples, integers: Tensor | None = None
    ) -> dict[str, float]:
        """Return the objective's figures and the metrics of the model `row [P]` on all samples
        together.
        """
        objective, sizes = self.dataset.objective, torch.tensor([len(samples)])
        totals = objective.add_up(
            self._count(row, samples, integers), lambda values: values.sum(0, keepdim=True)
        )
        totals["samples"] = sizes.to(next(iter(totals.values())))
        return {name: float(values[0]) for name, values in figures(objective, totals).items()}

    def tally(
        self,
        row: Tensor,
        samples: Samples,
        partition: Partition,
        clients: Sequence[int],
        integers: Tensor | None = None,
    ) -> Tally:
        """Score a model `row [P]` on the clients' samples by `partition`, in shared batches, so
        that small sets cost little.
        """
        index = torch.from_numpy(np.concatenate([partition[client] for client in clients]))
        sizes = torch.tensor([len(partition[client]) for client in clients])
        owner = torch.arange(len(clients)).repeat_interleave(sizes)
        totals = self.dataset.objective.add_up(
            {
                name: values.cpu()
                for name, values in self._count(row, samples, integers, index, owner).items()
            },
            lambda values: _by_owner(values.numpy(), owner.numpy(), len(clients)),
            owner,
        )
        return Tally(torch.tensor([*clients]), sizes, totals)

    def _count(
        self,
        row: Tensor,
        samples: Samples,
        integers: Tensor | None,
        index: Tensor | None = None,
        owner: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the objective's statistics of each sample (of `index`, or of all), `[n, ...]`
        float64 by name. The data set's metrics are of the samples of each `owner [n]`, or of all.
        """
        # Into tensors of its own, not by binding: how numbers lie in memory moves the last digits
        # of products.
        self.layout.load(self.module, row, integers)
        dataset, blocks, pairs = self.dataset, [], []
        count = len(samples) if index is None else len(index)
        # Layers that draw in evaluation mode, too, draw from a stream.
        with torch.no_grad(), global_stream(0, "evaluation", device=row.device):
            for start in range(0, count, self.batch_size):
                span: slice | Tensor = slice(start, start + self.batch_size)
                if index is not None:
                    span = index[span].to(samples.labels.device)
                batch = samples[span]
                outputs = self._inputs.call(self.module, dataset.prepare(batch.inputs))
                statistics = partial(dataset.objective.statistics, outputs)
                blocks.append(self._labels.call(statistics, batch.labels))
                if dataset.metrics:
                    pairs.append((prediction(outputs), batch.labels))
        names = blocks[0] if blocks else {}
        counts = {name: torch.cat([block[name].double() for block in blocks]) for name in names}
        if pairs:
            predicted, targets = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
            predicted, targets = map(dataset.objective.in_units, (predicted, targets))
            further = counted(dataset.metrics, predicted, targets, owner)
            counts |= {name: values.to(targets.device) for name, values in further.items()}
        return counts


def _by_owner(
    values: npt.NDArray[np.float64], owner: npt.NDArray[np.int64], clients: int
) -> Tensor:
    """The sums `[clients, ...]` of `values [n, ...]`, in one fixed order: adding up on a GPU would
    not be the same twice.
    """
    columns = values.reshape(len(values), -1).T
    sums = [np.bincount(owner, weights=column, minlength=clients) for column in columns]
    return torch.from_numpy(np.stack(sums, 1).reshape(clients, *values.shape[1:]))
