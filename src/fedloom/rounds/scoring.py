"""How good a model is on given samples, in all or client by client."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.flat.layout import Layout
from fedloom.objectives import Objective, Totals, prediction
from fedloom.objectives.metrics import counted, figures

WORST = 0.1
"""Share of the clients, those that the metric finds worst, whose mean is recorded too."""


@dataclass(frozen=True)
class Tally:
    """Counts on n clients' own test samples: the clients' numbers and how many samples each has, `[n]`, and the sums
    of what the objective counts, `[n, ...]` float64 by name."""

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
        totals = {name: torch.cat([tally.totals[name] for tally in tallies])[order] for name in tallies[0].totals}
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

        `_accuracy` (or whatever the metric is) and the other figures: over all their samples, so means weighted by samples.
        `_accuracy_std`: the population standard deviation of the clients' accuracies, and `_accuracy_worst` the mean over the
        tenth of the clients (at least one) with the worst accuracy, both with every client counted alike.
        Source: FedALA, section 5.1, and its authors' code for the weighted mean and the deviation.
        """
        metric = objective.metric
        values = self.each(objective)[metric.name]
        worst = values.sort(descending=not metric.higher_is_better).values[: math.ceil(WORST * len(self.clients))]
        overall = self.overall(objective)
        leading = {metric.name: overall.pop(metric.name), f"{metric.name}_std": float(values.std(correction=0)),
                   f"{metric.name}_worst": float(worst.mean())}  # fmt: skip
        return {f"{name}_{figure}": value for figure, value in (leading | overall).items()}


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
        return self.layout.copy(self._original).eval().requires_grad_(False)

    def score(self, row: Tensor, samples: Samples, integers: Tensor | None = None) -> dict[str, float]:
        """The objective's figures of the model `row [P]` on all samples together."""
        values = score(self._loaded(row, integers), self.dataset, samples, self.batch_size)
        return {name: float(value) for name, value in values.items()}

    def tally(
        self,
        row: Tensor,
        samples: Samples,
        partition: Partition,
        clients: Sequence[int],
        integers: Tensor | None = None,
    ) -> Tally:
        """Score one model `row [P]` on the samples that `partition` assigns to each of `clients`.

        Clients share batches, so that many small test sets cost no more than one large one.
        """
        index = torch.from_numpy(np.concatenate([partition[client] for client in clients]))
        predict = self._loaded(row, integers)
        return self._tally(
            {client: len(partition[client]) for client in clients},
            lambda owner: count(predict, self.dataset, samples, index, self.batch_size, owner),
        )

    def tallies(
        self, models: Iterable[tuple[int, Tensor, Tensor | None]], samples: Samples, partition: Partition
    ) -> Iterator[Tally]:
        """Score a model of each client's own, to the bits of `tally`: the client, its `row [P]` and its integer buffers.

        Each model passes over its client's samples; what it puts out is counted together with that of others, as many as
        share a batch.
        """
        waiting: list[tuple[int, Tensor, Tensor]] = []  # clients, outputs, labels
        for client, row, integers in models:
            index = partition[client]
            outputs = None
            if len(index) <= self.batch_size:
                batch = samples[torch.from_numpy(index).to(samples.labels.device)]
                with torch.no_grad():
                    outputs = self._loaded(row, integers)(self.dataset.prepare(batch.inputs))
            if not isinstance(outputs, Tensor):
                yield self.tally(row, samples, partition, [client], integers)
                continue
            if waiting and sum(len(labels) for _, _, labels in waiting) + len(index) > self.batch_size:
                yield self._together(waiting)
                waiting = []
            waiting.append((client, outputs, batch.labels))
        if waiting:
            yield self._together(waiting)

    def _together(self, waiting: Sequence[tuple[int, Tensor, Tensor]]) -> Tally:
        """The tally of several clients, each with what its model has put out and the labels of its samples."""
        clients, outputs, labels = zip(*waiting, strict=True)
        batch = torch.cat(outputs), torch.cat(labels)
        return self._tally(
            dict(zip(clients, map(len, labels), strict=True)), lambda owner: _counts(self.dataset, [batch], owner)
        )

    def _tally(self, sizes: Mapping[int, int], counts: Callable[[Tensor], Totals]) -> Tally:
        """Add up what is counted of samples, of which each client has so many: `counts` is given the owner of each."""
        samples = torch.tensor([*sizes.values()])
        owner = torch.arange(len(sizes)).repeat_interleave(samples)
        totals = self.dataset.objective.add_up(
            {name: values.cpu() for name, values in counts(owner).items()},
            lambda values: _by_owner(values.numpy(), owner.numpy(), len(sizes)),
            owner,
        )
        return Tally(torch.tensor([*sizes]), samples, totals)

    def _loaded(self, row: Tensor, integers: Tensor | None) -> nn.Module:
        """The module with the weights of `row [P]`."""
        # Into tensors of its own, not by binding: how numbers lie in memory moves the last digits of products.
        self.layout.load(self.module, row, integers)
        return self.module


def _by_owner(values: npt.NDArray[np.float64], owner: npt.NDArray[np.int64], clients: int) -> Tensor:
    """The sums `[clients, ...]` of `values [n, ...]`, in one fixed order: adding up on a GPU would not be the same twice."""
    columns = values.reshape(len(values), -1).T
    sums = [np.bincount(owner, weights=column, minlength=clients) for column in columns]
    return torch.from_numpy(np.stack(sums, 1).reshape(clients, *values.shape[1:]))


def score(
    predict: Callable[[Tensor], Any], dataset: Dataset, samples: Samples, batch_size: int = 500
) -> dict[str, Tensor]:
    """Return the objective's figures and the metrics over all samples, a float64 scalar by name; `predict` gives the model's
    outputs."""
    totals = dataset.objective.add_up(
        count(predict, dataset, samples, batch_size=batch_size), lambda values: values.sum(0, keepdim=True)
    )
    totals["samples"] = next(iter(totals.values())).new_tensor([len(samples)])
    return {name: values[0] for name, values in figures(dataset.objective, totals).items()}


def count(
    predict: Callable[[Tensor], Any],
    dataset: Dataset,
    samples: Samples,
    index: Tensor | None = None,
    batch_size: int = 500,
    owner: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the objective's statistics of each sample (of `index`, or of all), `[n, ...]` float64 by name; `predict` gives
    outputs. The data set's metrics are of the samples of each `owner [n]`, or of all."""

    def batches() -> Iterator[tuple[Any, Tensor]]:
        for start in range(0, len(samples) if index is None else len(index), batch_size):
            span = slice(start, start + batch_size)
            batch = samples[span] if index is None else samples[index[span].to(samples.labels.device)]
            yield predict(dataset.prepare(batch.inputs)), batch.labels

    return _counts(dataset, batches(), owner)


@torch.no_grad()
def _counts(dataset: Dataset, batches: Iterable[tuple[Any, Tensor]], owner: Tensor | None) -> dict[str, Tensor]:
    """Return the statistics of outputs and labels, batch by batch, and what the data set's metrics count."""
    blocks, pairs = [], []
    for outputs, labels in batches:
        blocks.append(dataset.objective.statistics(outputs, labels))
        if dataset.metrics:
            pairs.append((prediction(outputs), labels))
    statistics = {name: torch.cat([block[name].double() for block in blocks]) for name in blocks[0]} if blocks else {}
    if pairs:
        predicted, targets = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        predicted, targets = map(dataset.objective.in_units, (predicted, targets))
        further = counted(dataset.metrics, predicted, targets, owner)
        statistics |= {name: values.to(targets.device) for name, values in further.items()}
    return statistics
