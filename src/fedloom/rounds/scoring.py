"""Scores of models on test samples, over all samples or by client."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedloom.common.randomness import global_stream
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.flat.intact import IntactInputs
from fedloom.flat.layout import Layout
from fedloom.objectives import Objective, prediction
from fedloom.objectives.metrics import counted, figures

WORST = 0.1
"""Share of the clients in the mean over the worst clients."""


@dataclass(frozen=True)
class Tally:
    """The objective's sums over the test samples of n clients.

    Attributes:
        clients: Numbers of the clients, `[n]`.
        samples: Number of test samples of each client, `[n]`.
        totals: Sums by name, `[n, ...]`.
    """

    clients: Tensor
    samples: Tensor
    totals: dict[str, Tensor]

    @classmethod
    def joined(cls, tallies: "Sequence[Tally]") -> "Tally":
        """Return one tally of all clients, in the order of their numbers."""
        if not tallies:
            empty = torch.empty(0, dtype=torch.int64)
            return cls(empty, empty, {})
        clients = torch.cat([tally.clients for tally in tallies])
        order = clients.argsort()
        totals = {
            name: torch.cat([tally.totals[name] for tally in tallies])[order]
            for name in tallies[0].totals
        }
        return cls(clients[order], torch.cat([tally.samples for tally in tallies])[order], totals)

    def by_client(self, objective: Objective) -> dict[str, Tensor]:
        """Return the figures of each client by name, `[n]` float64."""
        return figures(objective, {**self.totals, "samples": self.samples.double()})

    def overall(self, objective: Objective) -> dict[str, float]:
        """Return the figures over all samples of all clients."""
        counts = {**self.totals, "samples": self.samples.double()}
        totals = objective.add_up(counts, lambda values: values.sum(0, keepdim=True))
        return {name: float(value) for name, value in figures(objective, totals).items()}

    def figures(self, name: str, objective: Objective) -> dict[str, float]:
        """Return summary figures of these clients.

        `_accuracy` (or the task's other metric) and the other figures are over all samples, so they
        are means weighted by samples. `_accuracy_std` is the population standard deviation of the
        clients' accuracies. `_accuracy_worst` is the mean over the tenth of the clients (at least
        one) with the worst accuracy. Both give all clients the same weight.

        Args:
            name: Prefix of the figures' names.
            objective: The task's objective.

        Returns:
            Figures by name. Shares are in [0, 1].

        Source: FedALA, section 5.1, and its authors' code for the weighted mean and the deviation.
        """
        metric = objective.metric
        values = self.by_client(objective)[metric.name]
        worst = values.sort(descending=not metric.higher_is_better).values[
            : math.ceil(WORST * len(self.clients))
        ]
        overall = self.overall(objective)
        summary = {
            metric.name: overall.pop(metric.name),
            f"{metric.name}_std": float(values.std(correction=0)),
            f"{metric.name}_worst": float(worst.mean()),
            **overall,
        }
        return {f"{name}_{figure}": value for figure, value in summary.items()}


class Evaluator:
    """Scores models on samples, through one module in evaluation mode.

    It changes neither the module's statistics nor the random streams.
    """

    batch_size = 500

    def __init__(self, module: nn.Module, layout: Layout, dataset: Dataset) -> None:
        self._original = module
        self.layout = layout
        self.dataset = dataset
        self._inputs = IntactInputs()
        self._labels = IntactInputs()

    @cached_property
    def module(self) -> nn.Module:
        """A copy of the module, made at the first access: most engines score no model."""
        return self.layout.copy(self._original).eval().requires_grad_(False)

    def score(
        self, row: Tensor, samples: Samples, integers: Tensor | None = None
    ) -> dict[str, float]:
        """Return the figures and metrics of one model over all samples.

        Args:
            row: Parameters of the model, `[P]`.
            samples: Test samples.
            integers: Integer buffers of the model, `[Z]`.

        Returns:
            Values by name. Shares are in [0, 1].
        """
        objective = self.dataset.objective
        sizes = torch.tensor([len(samples)])
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
        """Score one model on the samples of each client.

        Batches contain samples of several clients, so small test sets cost little.

        Args:
            row: Parameters of the model, `[P]`.
            samples: Test samples of all clients.
            partition: Samples of each client.
            clients: Clients to score on.
            integers: Integer buffers of the model, `[Z]`.

        Returns:
            Totals of each client, in the order of `clients`.
        """
        index = torch.from_numpy(np.concatenate([partition[client] for client in clients]))
        sizes = torch.tensor([len(partition[client]) for client in clients])
        owner = torch.arange(len(clients)).repeat_interleave(sizes)
        totals = self.dataset.objective.add_up(
            {
                name: values.cpu()
                for name, values in self._count(row, samples, integers, index, owner).items()
            },
            lambda values: _sum_by_client(values.numpy(), owner.numpy(), len(clients)),
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
        """Return statistics of each sample by name, `[n, ...]` float64.

        With `index [n]`, only these samples count. The data set's metrics are computed over the
        samples of each client in `owner [n]`, or over all samples without `owner`.
        """
        # Copy into the module's own tensors, not views: the memory layout changes the last digits
        # of products.
        self.layout.load(self.module, row, integers)
        dataset = self.dataset
        blocks = []
        pairs = []
        count = len(samples) if index is None else len(index)
        # Some layers also draw random numbers in evaluation mode: use a fixed stream.
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
            metrics = counted(dataset.metrics, predicted, targets, owner)
            counts |= {name: values.to(targets.device) for name, values in metrics.items()}
        return counts


def _sum_by_client(
    values: npt.NDArray[np.float64], owner: npt.NDArray[np.int64], clients: int
) -> Tensor:
    """Sum `values [n, ...]` by client to `[clients, ...]`, in a fixed order on the CPU.

    Sums on a GPU are not reproducible.
    """
    columns = values.reshape(len(values), -1).T
    sums = [np.bincount(owner, weights=column, minlength=clients) for column in columns]
    return torch.from_numpy(np.stack(sums, 1).reshape(clients, *values.shape[1:]))
