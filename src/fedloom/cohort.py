"""A cohort: K clients, their data, their memory, and local training on the rows `[K, P]` of their models.

Client code is written for a leading client axis. It runs with K = 1 where clients train one after another (this process, a
worker, a real site), and with K = many where they are stacked and advance together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.data.augmentation import flip_crop
from fedloom.data.dataset import Dataset, Samples
from fedloom.layout import Layout, Unit
from fedloom.replica import Batch, Objective, Replica, cross_entropy
from fedloom.round import Round
from fedloom.store import Memory
from fedloom.training import Training, batch_order

Given = Mapping[str, Tensor]
"""What a method hands to its hooks: named tensors with one row a client, `[k, ...]`."""

Correction = Callable[[Tensor, Tensor, Given], Tensor]
"""(weights `[k, T]`, gradient `[k, T]`, given) -> the gradient to use; it may change the gradient in place."""


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
        replica: Replica,
        training: Training,
        round: Round,
        memory: Memory,
        uploads: Sequence[bool] | None = None,
    ) -> None:
        self.clients = tuple(clients)
        self.round = round
        self.training = training
        self.memory = memory
        self.replica = replica
        self.layout: Layout = replica.layout
        self.sizes = torch.tensor([len(s) for s in samples])
        self.uploads = torch.tensor([True] * len(self.clients) if uploads is None else list(uploads))
        self.metrics: dict[str, Tensor] = {}
        self._dataset = dataset
        self._samples = samples
        self._prepared: Tensor | None = None

    def stream(self, purpose: str) -> list[torch.Generator]:
        """One random stream a client, at its beginning."""
        return [self.round.stream(purpose, client) for client in self.clients]

    def subset(self, choose: Callable[[Samples, torch.Generator], Samples], purpose: str) -> Cohort:
        """The same clients with part of their data, chosen by each client from its own stream."""
        streams = self.stream(purpose)
        chosen = [choose(samples, generator) for samples, generator in zip(self._samples, streams, strict=True)]
        part = Cohort(
            self.clients,
            chosen,
            self._dataset,
            self.replica,
            self.training,
            self.round,
            self.memory,
            self.uploads.tolist(),
        )
        part.metrics = self.metrics
        return part

    @property
    def labels(self) -> list[Tensor]:
        """The training labels of each client."""
        return [samples.labels for samples in self._samples]

    @property
    def classes(self) -> int:
        return self._dataset.classes

    def batches(
        self,
        *,
        purpose: str = "batches",
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool | None = None,
    ) -> Iterator[Batch]:
        """The batches of local training with a leading client axis, in the order of each client's stream.

        Whatever is not given comes from `training`. A second pass in the same round draws another order under another
        `purpose`.
        """
        settings = self.training
        samples = self._samples[0]
        generator = self.round.stream(purpose, self.clients[0])
        size = settings.batch_size if batch_size is None else batch_size
        own_length = epochs is not None or steps is not None
        order = batch_order(
            len(samples),
            generator if shuffle else None,
            batch_size=size,
            epochs=epochs or settings.epochs,
            steps=steps if own_length else settings.steps,
            drop_last=settings.drop_last if drop_last is None else drop_last,
            smallest=2 if self.replica.needs_pairs else 1,
        )
        augmented = settings.augmentation == "flip_crop"
        noise = self.round.stream(f"{purpose}/augmentation", self.clients[0]) if augmented else None
        if self._prepared is None and not augmented:
            self._prepared = self._dataset.prepare(samples.inputs)
        for step, index in enumerate(order):
            index = index.to(samples.labels.device)
            if noise is not None:
                inputs = self._dataset.prepare(flip_crop(samples.inputs[index], noise))
            else:
                assert self._prepared is not None
                inputs = self._prepared[index]
            yield Batch(inputs.unsqueeze(0), samples.labels[index].unsqueeze(0), step)

    def gradient(
        self, rows: Tensor, batch: Batch, objective: Objective = cross_entropy, given: Given | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss `[k]` and gradient `[k, T]` of each client's objective at its row of `[k, P]`, in training mode: statistics in
        `rows[:, T:]` move. The gradient is overwritten by the next call."""
        return self.replica.gradient(rows, batch, objective, given or {})

    def fit(
        self,
        start: Tensor,
        *,
        objective: Objective = cross_entropy,
        correction: Correction | None = None,
        given: Given | None = None,
        only: Unit | None = None,
        purpose: str = "batches",
        epochs: int | None = None,
        steps: int | None = None,
        learning_rate: float | None = None,
    ) -> Trained:
        """Local SGD from `start [k, P]`, which is left as it is (spec: LocalSGD; FedAvg, algorithm 1).

        Each step takes one batch, the gradient of `objective`, then `correction`, clipping, weight decay and momentum as
        `training` says. With `only`, just those slices of the parameters move.
        """
        weights = start.clone()
        settings = self.training if learning_rate is None else replace(self.training, learning_rate=learning_rate)
        rate = self.round.learning_rate if learning_rate is None else learning_rate
        trainable = weights[:, : self.layout.trainable]
        update = make_update(settings, rate, trainable, only)
        held = given or {}
        losses: list[Tensor] = []
        self.replica.train_only(only)
        try:
            for batch in self.batches(purpose=purpose, epochs=epochs, steps=steps):
                loss, gradient = self.gradient(weights, batch, objective, held)
                losses.append(loss)
                with torch.no_grad():
                    if correction is not None:
                        gradient = correction(trainable, gradient, held)
                    if settings.clip is not None:
                        gradient = clipped(gradient, settings.clip)
                    update(gradient)
        finally:
            self.replica.train_only(None)
        count = torch.full((len(self.clients),), len(losses))
        mean = torch.stack(losses).mean(0) if losses else torch.full_like(count, torch.nan, dtype=weights.dtype)
        self.metrics["training_loss"] = mean
        return Trained(weights, count, mean)

    def loss(self, rows: Tensor, *, samples: Sequence[Samples] | None = None, batch_size: int = 1024) -> Tensor:
        """Mean cross entropy `[k]` of each row on its client's samples (or on those given), in evaluation mode."""
        held = self._samples[0] if samples is None else samples[0]
        total = torch.zeros((), device=rows.device)
        for first in range(0, len(held), batch_size):
            part = held[first : first + batch_size]
            logits = self.replica.logits(rows, self._dataset.prepare(part.inputs).unsqueeze(0))[0]
            total += F.cross_entropy(logits, part.labels, reduction="sum")
        mean: Tensor = total / len(held)
        return mean.unsqueeze(0)


def clipped(gradient: Tensor, limit: float) -> Tensor:
    """Each row of `[k, T]` scaled down to a norm of at most `limit`."""
    norm = gradient.norm(dim=1, keepdim=True)
    return gradient * (limit / (norm + 1e-6)).clamp(max=1.0)


def make_update(settings: Training, rate: float, weights: Tensor, only: Unit | None) -> Callable[[Tensor], None]:
    """A fresh optimiser over `weights [k, T]` as a function that applies one gradient `[k, T]` in place.

    SGD is written out, on each slice of `only`; any other optimiser of torch gets one flat tensor a slice.
    """
    parts = [slice(None)] if only is None else [part for part in only if part.stop <= weights.shape[1]]
    if settings.optimiser == "sgd":
        return _sgd(settings, rate, [weights[:, part] for part in parts], parts)
    tensors = [torch.nn.Parameter(weights[:, part], requires_grad=True) for part in parts]
    optimiser = _torch_optimiser(settings, rate, tensors)

    def apply(gradient: Tensor) -> None:
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = gradient[:, part]
        optimiser.step()

    return apply


def _sgd(settings: Training, rate: float, weights: list[Tensor], parts: list[slice]) -> Callable[[Tensor], None]:
    nesterov = bool(settings.optimiser_options.get("nesterov", False))
    dampening = float(settings.optimiser_options.get("dampening", 0.0))
    velocity: list[Tensor] = []

    def apply(gradient: Tensor) -> None:
        first = not velocity
        for k, (w, part) in enumerate(zip(weights, parts, strict=True)):
            step = gradient[:, part]
            if settings.weight_decay:
                step = step.add_(w, alpha=settings.weight_decay)
            if settings.momentum:
                if first:
                    velocity.append(step.clone())
                else:
                    velocity[k].mul_(settings.momentum).add_(step, alpha=1 - dampening)
                step = step.add(velocity[k], alpha=settings.momentum) if nesterov else velocity[k]
            w.add_(step, alpha=-rate)

    return apply


def _torch_optimiser(settings: Training, rate: float, tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    known = {name.lower(): name for name in dir(torch.optim)}
    kind = getattr(torch.optim, known[settings.optimiser])
    options = dict(settings.optimiser_options)
    if settings.momentum and settings.optimiser == "rmsprop":
        options["momentum"] = settings.momentum
    if settings.weight_decay:
        options["weight_decay"] = settings.weight_decay
    optimiser: torch.optim.Optimizer = kind(tensors, lr=rate, **options)
    return optimiser
