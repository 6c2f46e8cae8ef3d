"""A cohort: K clients, their data, their memory, and local training on the rows `[K, P]` of their models.

Client code is written for a leading client axis. It runs with K = 1 where clients train one after another (this process, a
worker, a real site), and with K = many where they are stacked and advance together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.config.rates import CONSTANT
from fedloom.data.dataset import Dataset, Samples
from fedloom.flat.layout import Layout, Unit
from fedloom.flat.module import Batch, FlatModule, LossFn, data_loss, head_loss
from fedloom.local.batches import ClientLoader, LockStep, alone, together
from fedloom.local.optimizer import Context as Context
from fedloom.local.optimizer import Correction as Correction
from fedloom.local.optimizer import GradientFn as GradientFn
from fedloom.local.optimizer import LocalOptimizer, StepRates
from fedloom.objectives import prediction
from fedloom.objectives.metrics import NamedMetric, counted, figures
from fedloom.round import Round
from fedloom.state.store import Memory
from fedloom.training import Training, epoch_orders

Step = Callable[[dict[str, Tensor], Batch], Tensor]
"""(state, batch) -> loss `[k]`; it changes the tensors of the state, `[k, ...]`, in place."""

FEATURES_AT_ONCE = 256
"""How many samples pass forward at once when only features are wanted."""


class Trained(NamedTuple):
    """What local training returns: the models `[k, P]`, the steps made `[k]` and the mean loss over them `[k]`."""

    model: Tensor
    steps: Tensor
    loss: Tensor


class Cohort:
    """The clients that train together, as the client half of a method sees them.

    Attributes: `clients`, their numbers; `round`; `layout`; `training`, the settings of local SGD; `memory`, what they
    remember; `sizes [k]`, their numbers of training samples; `uploads [k]`, whether each was selected to upload;
    `metrics`, named figures `[k]` to be recorded (`fit` adds `training_loss`).
    """

    def __init__(
        self,
        clients: Sequence[int],
        samples: Sequence[Samples],
        dataset: Dataset,
        flat_module: FlatModule,
        training: Training,
        round: Round,
        memory: Memory,
        uploads: Sequence[bool] | None = None,
    ) -> None:
        self.clients = tuple(clients)
        self.round = round
        self.training = training
        self.memory = memory
        self.flat_module = flat_module
        self.layout: Layout = flat_module.layout
        self.sizes = torch.tensor([len(s) for s in samples])
        self.uploads = torch.tensor([True] * len(self.clients) if uploads is None else list(uploads))
        self.metrics: dict[str, Tensor] = {}
        self._dataset = dataset
        self._samples = samples
        self._loaders = [ClientLoader(own, dataset) for own in samples]

    def stream(self, purpose: str) -> list[torch.Generator]:
        """One random stream a client, at its beginning."""
        return [self.round.stream(purpose, client) for client in self.clients]

    def subset(
        self, choose: Callable[[Samples, torch.Generator], Samples], purpose: str, *, lasting: bool = False
    ) -> Cohort:
        """The same clients with part of their data, chosen by each client from its own stream: of this round, or, where the
        choice is `lasting`, one that is the same in every round."""
        round = replace(self.round, number=0) if lasting else self.round
        streams = [round.stream(purpose, client) for client in self.clients]
        chosen = [choose(samples, generator) for samples, generator in zip(self._samples, streams, strict=True)]
        return self._with(chosen)

    def _with(self, samples: Sequence[Samples]) -> Cohort:
        """The same clients with other samples."""
        held = self._dataset, self.flat_module, self.training, self.round, self.memory
        part = Cohort(self.clients, samples, *held, self.uploads.tolist())
        part.metrics = self.metrics
        return part

    def for_classifier(self, rows: Tensor) -> tuple[Cohort, LossFn]:
        """What to train the classifiers of models `[k, P]` with, their bases held fixed: the same clients with what enters the
        classifier in place of their inputs, so that one forward pass serves every epoch, and the loss of that; or, where it is
        not a function of each sample alone or would save no time, these clients and the data loss."""
        # Batched products through all linear layers take less time (0.85) than the classifier alone under vmap.
        products = self.flat_module.heeds_share(data_loss)
        if products or self.training.augmentation != "none":
            return self, data_loss
        seen = []
        for place, held in enumerate(self._samples):
            found = []
            for first in range(0, len(held), FEATURES_AT_ONCE):
                inputs = self._dataset.prepare(held[first : first + FEATURES_AT_ONCE].inputs)
                features = self.flat_module.features(rows[place : place + 1], inputs.unsqueeze(0))
                if features is None:
                    return self, data_loss
                found.append(features[0])
            seen.append(Samples(torch.cat(found), held.labels))
        return self._with(seen), head_loss

    @property
    def labels(self) -> list[Tensor]:
        """The training labels of each client."""
        return [samples.labels for samples in self._samples]

    @property
    def classes(self) -> int:
        return self._dataset.classes

    @property
    def module(self) -> nn.Module:
        """The architecture, with the weights that the task starts from."""
        return self.flat_module.original

    @property
    def initial(self) -> Tensor:
        """The model that the task starts from, `[1, P]`: what a client has of the parts that it was never sent."""
        return self.flat_module.initial.unsqueeze(0)

    def lock_steps(
        self,
        *,
        purpose: str = "batches",
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool | None = None,
        active: Tensor | None = None,
        in_step: bool = True,
        pad: bool = False,
    ) -> Iterator[LockStep]:
        """The batches of local training with a leading client axis, in the order of each client's stream: those that all clients
        take together, or, where that is not possible, some clients and then others.

        Whatever is not given comes from `training`. A second pass in the same round draws another order under another
        `purpose`. With `active [k]` bool, only the clients marked there have batches. Without `in_step`, `Batch.step`
        only tells a client's first step from the others. With `pad`, batches may hold padding, for steps that heed
        `Batch.share`.
        """
        settings = self.training
        own_length = epochs is not None or steps is not None
        wanted = [True] * len(self.clients) if active is None else active.tolist()
        orders = [
            epoch_orders(
                len(samples),
                self.round.stream(purpose, client) if shuffle else None,
                batch_size=settings.batch_size if batch_size is None else batch_size,
                epochs=epochs or settings.epochs,
                steps=steps if own_length else settings.steps,
                drop_last=settings.drop_last if drop_last is None else drop_last,
                smallest=self.flat_module.smallest_batch,
            )
            if chosen
            else iter(())
            for chosen, client, samples in zip(wanted, self.clients, self._samples, strict=True)
        ]
        augmented = settings.augmentation == "flip_crop"
        noises = self.stream(f"{purpose}/augmentation") if augmented else [None] * len(orders)
        if len(orders) == 1:
            return iter([LockStep(None, alone(self._loaders[0], orders[0], noises[0]), 1)])
        return together(self._loaders, orders, noises, in_step=in_step, pad=pad)

    def gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn = data_loss, context: Context | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss `[k]` and gradient `[k, T]` of each client's objective at its row of `[k, P]`, in training mode: statistics in
        `rows[:, T:]` move. The gradient is overwritten by the next call."""
        return self.flat_module.gradient(rows, batch, loss_fn, context or {})

    def partial_gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn = data_loss, context: Context | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same in `each_batch(..., only=unit)`, with just the slices of that unit side by side, `[k, n]`."""
        return self.flat_module.partial_gradient(rows, batch, loss_fn, context or {})

    def fit(
        self,
        start: Tensor,
        *,
        loss_fn: LossFn = data_loss,
        gradient_fn: GradientFn | None = None,
        correction: Correction | None = None,
        context: Context | None = None,
        only: Unit | None = None,
        purpose: str = "batches",
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        drop_last: bool | None = None,
        learning_rate: float | Tensor | None = None,
        pad: bool = False,
    ) -> Trained:
        """Local SGD from `start [k, P]`, which is left as it is (FedAvg, algorithm 1).

        Each step takes one batch, the gradient of `loss_fn` (or what `gradient_fn` gives in its place), then `correction`,
        clipping, weight decay and momentum as `training` says. With `only`, just those slices of the parameters move.
        `learning_rate` stands for that of the round, and may be one for each client, `[k]`. `pad` promises that `gradient_fn`
        looks at its batch through `gradient` alone, so that short batches may be filled up where that is faster.
        """
        settings = self.training
        rate = self.round.learning_rate if learning_rate is None else learning_rate
        totals = torch.zeros_like(self.sizes)
        if settings.local_schedule != CONSTANT:
            asked = {"epochs": epochs, "batch_size": batch_size, "drop_last": drop_last}
            given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
            length = replace(settings, steps=steps if steps or epochs else settings.steps, **given)
            totals = length.local_steps(self.sizes, self.flat_module.smallest_batch)
        rates = StepRates(rate, settings.local_schedule, totals)
        weights = start.clone()
        state = {"weights": weights}
        if settings.optimizer == "sgd" and settings.momentum:
            state["velocity"] = torch.empty_like(weights[:, : self.layout.trainable])
        losses = _Losses(len(self.clients))
        self.flat_module.train_only(only)
        try:
            optimizer = LocalOptimizer(
                self.flat_module, settings, rates, weights, only, loss_fn, gradient_fn, correction
            )
            for group in self.lock_steps(
                purpose=purpose,
                epochs=epochs,
                steps=steps,
                batch_size=batch_size,
                drop_last=drop_last,
                in_step=gradient_fn is not None or loss_fn is not data_loss,
                pad=(pad or gradient_fn is None) and self.flat_module.heeds_share(loss_fn),
            ):
                part = group.take(state)
                losses.add(group, optimizer.take(group, part, group.take(context or {})))
                group.put(state, part)
        finally:
            self.flat_module.train_only(None)
        mean = losses.mean(weights)
        self.metrics["training_loss"] = mean
        return Trained(weights, losses.counts(), mean)

    def each_batch(
        self,
        step: Step,
        state: dict[str, Tensor],
        *,
        only: Unit | None = None,
        purpose: str = "batches",
        in_order: bool = False,
        active: Tensor | None = None,
        pad: bool = False,
    ) -> Tensor:
        """Run `step` on every batch and return the mean of its losses `[k]`: for methods whose inner loop is not `fit`'s.

        Whatever belongs to a client goes into `state`, since a step is given only the clients that have its batch. With
        `only`, gradients are taken for those slices alone, and zero elsewhere. With `in_order`, each client passes once over all
        of its samples as they lie. With `active [k]` bool, only the clients marked there take steps. `pad` promises that `step`
        looks at its batch through `gradient` alone, as in `fit`.
        """
        losses = _Losses(len(self.clients))
        self.flat_module.train_only(only)
        try:
            for group in self.lock_steps(
                purpose=purpose,
                epochs=1 if in_order else None,
                shuffle=not in_order,
                drop_last=False if in_order else None,
                active=active,
                pad=pad and self.flat_module.heeds_share(data_loss),
            ):
                part = group.take(state)
                losses.add(group, [step(part, batch) for batch in group.batches])
                group.put(state, part)
        finally:
            self.flat_module.train_only(None)
        return losses.mean(self.flat_module.like)

    def batches(self, purpose: str = "batches") -> Iterator[Batch]:
        """All batches of local training, one after another."""
        for group in self.lock_steps(purpose=purpose):
            yield from group.batches

    def loss(self, rows: Tensor) -> Tensor:
        """Mean loss `[k]`, as the objective has it, of each row on its client's samples, in evaluation mode."""
        pairs = zip(rows, self._samples, strict=True)
        found = [score(partial(self.flat_module.outputs, row), self._dataset, held, metrics=()) for row, held in pairs]
        return torch.stack([figures["loss"] for figures in found]).to(rows)


def score(
    predict: Callable[[Tensor], Any],
    dataset: Dataset,
    samples: Samples,
    batch_size: int = 500,
    metrics: Sequence[NamedMetric] | None = None,
) -> dict[str, Tensor]:
    """The objective's figures and the metrics over all samples where `predict` gives the model's outputs: a float64 scalar by
    name."""
    found = count(predict, dataset, samples, batch_size=batch_size, metrics=metrics)
    totals = {name: values.sum(0, keepdim=True) for name, values in found.items()}
    totals["samples"] = next(iter(totals.values())).new_tensor([len(samples)])
    return {name: values[0] for name, values in figures(dataset.objective, totals).items()}


@torch.no_grad()
def count(
    predict: Callable[[Tensor], Any],
    dataset: Dataset,
    samples: Samples,
    index: Tensor | None = None,
    batch_size: int = 500,
    owner: Tensor | None = None,
    metrics: Sequence[NamedMetric] | None = None,
) -> dict[str, Tensor]:
    """What the objective counts of each sample (of `index`, or of all), `[n, ...]` float64 by name; `predict` gives outputs.
    The metrics, by default the data set's, are of the samples of each `owner [n]`, or of all together."""
    metrics = dataset.metrics if metrics is None else metrics
    parts, seen = [], []
    for start in range(0, len(samples) if index is None else len(index), batch_size):
        part = slice(start, start + batch_size)
        batch = samples[part] if index is None else samples[index[part].to(samples.labels.device)]
        outputs = predict(dataset.prepare(batch.inputs))
        parts.append(dataset.objective.statistics(outputs, batch.labels))
        if metrics:
            seen.append((prediction(outputs), batch.labels))
    found = {name: torch.cat([part[name].double() for part in parts]) for name in parts[0]} if parts else {}
    if seen:
        outputs, targets = (torch.cat(tensors) for tensors in zip(*seen, strict=True))
        found |= {name: values.to(targets.device) for name, values in counted(metrics, outputs, targets, owner).items()}
    return found


@torch.no_grad()
def counts(dataset: Dataset, outputs: Tensor, labels: Tensor, owner: Tensor) -> dict[str, Tensor]:
    """As `count`, where the models' outputs `[n, ...]` are known."""
    found = {name: values.double() for name, values in dataset.objective.statistics(outputs, labels).items()}
    metrics = counted(dataset.metrics, outputs, labels, owner) if dataset.metrics else {}
    return found | {name: values.to(labels.device) for name, values in metrics.items()}


class _Losses:
    """The losses of k clients' steps."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.found: list[tuple[LockStep, list[Tensor]]] = []

    def add(self, group: LockStep, losses: list[Tensor]) -> None:
        """The losses, `[g]` each, of steps that some clients took together."""
        if losses:
            self.found.append((group, losses))

    def counts(self) -> Tensor:
        """The steps of each client, `[k]`."""
        counts = torch.zeros(self.clients, dtype=torch.int64)
        for group, losses in self.found:
            counts[group.members()] += len(losses)
        return counts

    def mean(self, like: Tensor) -> Tensor:
        """Over the steps of each client, `[k]`; NaN for one without a step."""
        if all(group.clients is None for group, _ in self.found):
            every = [loss for _, losses in self.found for loss in losses]
            return torch.stack(every).mean(0) if every else like.new_full((self.clients,), torch.nan)
        total = like.new_zeros(self.clients)
        for group, losses in self.found:
            total[group.members()] += torch.stack(losses).sum(0)
        return total / self.counts().to(total)
