"""A cohort: K clients, their data, their memory, and local training on the rows `[K, P]` of their models.

Client code is written for a leading client axis. It runs with K = 1 where clients train one after another (this process, a
worker, a real site), and with K = many where they are stacked and advance together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.data.augmentation import flip_crop
from fedloom.data.dataset import Dataset, Samples
from fedloom.layout import Layout, Unit
from fedloom.replica import Batch, Objective, Replica, cross_entropy
from fedloom.round import Round
from fedloom.store import Memory
from fedloom.training import Training, epoch_orders

Given = Mapping[str, Tensor]
"""What a method hands to its hooks: named tensors with one row a client, `[k, ...]`."""

Correction = Callable[[Tensor, Tensor, Given], Tensor]
"""(weights `[k, T]`, gradient `[k, T]`, given) -> the gradient to use; it may change the gradient in place."""


Slope = Callable[[Tensor, Batch, Given], tuple[Tensor, Tensor]]
"""(weights `[k, P]`, batch, given) -> loss `[k]` and the gradient `[k, T]` to use, from `Cohort.gradient` wherever the method
wants it taken."""

Step = Callable[[dict[str, Tensor], Batch], Tensor]
"""(state, batch) -> loss `[k]`; it changes the tensors of the state, `[k, ...]`, in place."""

AHEAD = 1 << 23
"""How many input values are gathered ahead of the steps that use them (32 MiB as floats): one copy instead of one a step."""


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

    def subset(
        self, choose: Callable[[Samples, torch.Generator], Samples], purpose: str, *, lasting: bool = False
    ) -> Cohort:
        """The same clients with part of their data, chosen by each client from its own stream: of this round, or, where the
        choice is `lasting`, one that is the same in every round."""
        round = replace(self.round, number=0) if lasting else self.round
        streams = [round.stream(purpose, client) for client in self.clients]
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

    def featured(self, rows: Tensor) -> Cohort | None:
        """The same clients with what enters the classifier of their model `[k, P]` in place of their inputs, for work on the
        classifier alone (`head_cross_entropy`). None where features are not a function of each sample alone."""
        if self.training.augmentation != "none":
            return None
        held, found = self._samples[0], []
        for first in range(0, len(held), FEATURES_AT_ONCE):
            inputs = self._dataset.prepare(held[first : first + FEATURES_AT_ONCE].inputs)
            features = self.replica.features(rows, inputs.unsqueeze(0))
            if features is None:
                return None
            found.append(features[0])
        seen = Samples(torch.cat(found), held.labels)
        return self.subset(lambda samples, generator: seen, "features")

    @property
    def labels(self) -> list[Tensor]:
        """The training labels of each client."""
        return [samples.labels for samples in self._samples]

    @property
    def classes(self) -> int:
        return self._dataset.classes

    @property
    def module(self) -> nn.Module:
        """The architecture; its own weights mean nothing."""
        return self.replica.module

    @property
    def initial(self) -> Tensor:
        """The model that the task starts from, `[1, P]`: what a client has of the parts that it was never sent."""
        return self.replica.initial.unsqueeze(0)

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
        own_length = epochs is not None or steps is not None
        orders = epoch_orders(
            len(samples),
            self.round.stream(purpose, self.clients[0]) if shuffle else None,
            batch_size=settings.batch_size if batch_size is None else batch_size,
            epochs=epochs or settings.epochs,
            steps=steps if own_length else settings.steps,
            drop_last=settings.drop_last if drop_last is None else drop_last,
            smallest=2 if self.replica.needs_pairs else 1,
        )
        augmented = settings.augmentation == "flip_crop"
        noise = self.round.stream(f"{purpose}/augmentation", self.clients[0]) if augmented else None
        values = max(1, samples.inputs[0].numel())
        if self._prepared is None and noise is None and len(samples) * values <= AHEAD:
            self._prepared = self._dataset.prepare(samples.inputs)
        step = 0
        for order, sizes in orders:
            at_once = max(1, AHEAD // (values * sizes[0]))
            for first in range(0, len(sizes), at_once):
                chosen = sizes[first : first + at_once]
                index = order[sum(sizes[:first]) : sum(sizes[:first]) + sum(chosen)].to(samples.labels.device)
                inputs = self._gather(index, noise).unsqueeze(0).split(chosen, 1)
                labels = samples.labels[index].unsqueeze(0).split(chosen, 1)
                for one, two in zip(inputs, labels, strict=True):
                    yield Batch(one, two, step)
                    step += 1

    def _gather(self, index: Tensor, noise: torch.Generator | None) -> Tensor:
        """The inputs of some of the client's samples, ready for the model."""
        if noise is not None:
            return self._dataset.prepare(flip_crop(self._samples[0].inputs[index], noise))
        if self._prepared is not None:
            return self._prepared[index]
        return self._dataset.prepare(self._samples[0].inputs[index])

    def gradient(
        self, rows: Tensor, batch: Batch, objective: Objective = cross_entropy, given: Given | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss `[k]` and gradient `[k, T]` of each client's objective at its row of `[k, P]`, in training mode: statistics in
        `rows[:, T:]` move. The gradient is overwritten by the next call."""
        return self.replica.gradient(rows, batch, objective, given or {})

    def partial_gradient(
        self, rows: Tensor, batch: Batch, objective: Objective = cross_entropy, given: Given | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same in `each_batch(..., only=unit)`, with just the slices of that unit side by side, `[k, n]`."""
        return self.replica.partial_gradient(rows, batch, objective, given or {})

    def fit(
        self,
        start: Tensor,
        *,
        objective: Objective = cross_entropy,
        slope: Slope | None = None,
        correction: Correction | None = None,
        given: Given | None = None,
        only: Unit | None = None,
        purpose: str = "batches",
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        drop_last: bool | None = None,
        learning_rate: float | None = None,
    ) -> Trained:
        """Local SGD from `start [k, P]`, which is left as it is (spec: LocalSGD; FedAvg, algorithm 1).

        Each step takes one batch, the gradient of `objective` (or what `slope` gives in its place), then `correction`,
        clipping, weight decay and momentum as `training` says. With `only`, just those slices of the parameters move.
        """
        weights = start.clone()
        settings = self.training if learning_rate is None else replace(self.training, learning_rate=learning_rate)
        rate = self.round.learning_rate if learning_rate is None else learning_rate
        held = given or {}
        losses: list[Tensor] = []
        self.replica.train_only(only)
        try:
            batches = self.batches(
                purpose=purpose, epochs=epochs, steps=steps, batch_size=batch_size, drop_last=drop_last
            )
            if settings.optimiser == "sgd" and settings.clip is None and correction is None and slope is None:
                # Nothing looks at the whole gradient: each tensor is updated from where autograd left its gradient.
                apply = sgd(settings, rate, self.replica.tensors(weights))
                for batch in batches:
                    loss, gradients = self.replica.tensor_gradients(weights, batch, objective, held)
                    losses.append(loss)
                    apply(gradients)
            else:
                trainable = weights[:, : self.layout.trainable]
                update = make_update(settings, rate, trainable, only)
                for batch in batches:
                    if slope is None:
                        loss, gradient = self.gradient(weights, batch, objective, held)
                    else:
                        loss, gradient = slope(weights, batch, held)
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

    def each_batch(
        self,
        step: Step,
        state: dict[str, Tensor],
        *,
        only: Unit | None = None,
        purpose: str = "batches",
        epochs: int | None = None,
        shuffle: bool = True,
        drop_last: bool | None = None,
    ) -> Tensor:
        """Run `step` on every batch and return the mean of its losses `[k]`: for methods whose inner loop is not `fit`'s.

        Whatever belongs to a client goes into `state`, since a step is given only the clients that have its batch. With
        `only`, gradients are taken for those slices alone, and zero elsewhere.
        """
        self.replica.train_only(only)
        try:
            batches = self.batches(purpose=purpose, epochs=epochs, shuffle=shuffle, drop_last=drop_last)
            losses = [step(state, batch) for batch in batches]
        finally:
            self.replica.train_only(None)
        if not losses:
            return torch.full((len(self.clients),), torch.nan, dtype=self.layout.dtype)
        return torch.stack(losses).mean(0)

    def loss(self, rows: Tensor, *, samples: Sequence[Samples] | None = None, batch_size: int = 1024) -> Tensor:
        """Mean cross entropy `[k]` of each row on its client's samples (or on those given), in evaluation mode."""
        held = self._samples[0] if samples is None else samples[0]
        total = torch.zeros((), dtype=rows.dtype, device=rows.device)
        for first in range(0, len(held), batch_size):
            part = held[first : first + batch_size]
            logits = self.replica.logits(rows, self._dataset.prepare(part.inputs).unsqueeze(0))[0]
            total += F.cross_entropy(logits, part.labels, reduction="sum")
        mean: Tensor = total / len(held)
        return mean.unsqueeze(0)


def clipped(gradient: Tensor, limit: float) -> Tensor:
    """Each row of `[k, T]` scaled down to a norm of at most `limit`."""
    norm = gradient.norm(dim=1, keepdim=True)
    scaled: Tensor = gradient * (limit / (norm + 1e-6)).clamp(max=1.0)
    return scaled


def make_update(settings: Training, rate: float, weights: Tensor, only: Unit | None) -> Callable[[Tensor], None]:
    """A fresh optimiser over `weights [k, T]` as a function that applies one gradient `[k, T]` in place.

    It moves each slice of `only`; the optimisers of torch get one flat tensor a slice.
    """
    parts = [slice(None)] if only is None else [part for part in only if part.stop <= weights.shape[1]]
    pieces = [weights[:, part] for part in parts]
    if settings.optimiser == "sgd":
        apply = sgd(settings, rate, pieces)
        return lambda gradient: apply([gradient[:, part] for part in parts])
    tensors = [torch.nn.Parameter(piece) for piece in pieces]
    optimiser = _torch_optimiser(settings, rate, tensors)

    def step(gradient: Tensor) -> None:
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = gradient[:, part]
        optimiser.step()

    return step


def sgd(settings: Training, rate: float, weights: list[Tensor]) -> Callable[[Sequence[Tensor]], None]:
    """A fresh SGD over `weights` as a function that applies one gradient for each in place (it may overwrite them)."""
    momentum = settings.momentum
    nesterov = bool(settings.optimiser_options.get("nesterov", False))
    dampening = float(settings.optimiser_options.get("dampening", 0.0))
    velocity: list[Tensor] = []

    @torch.no_grad()
    def apply(gradients: Sequence[Tensor]) -> None:
        step = list(gradients)
        if settings.weight_decay:
            torch._foreach_add_(step, weights, alpha=settings.weight_decay)
        if momentum:
            if velocity:
                torch._foreach_mul_(velocity, momentum)
                torch._foreach_add_(velocity, step, alpha=1 - dampening)
            else:
                velocity.extend(gradient.clone() for gradient in step)
            step = list(torch._foreach_add(step, velocity, alpha=momentum)) if nesterov else velocity
        torch._foreach_add_(weights, step, alpha=-rate)

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
