"""A cohort: k clients, their data, their memory, and local training on the rows `[k, P]` of their
models.

Client code is written for a leading client axis. It runs with k = 1 where clients train one after
another (this process, a worker, a real site), and with k > 1 where they advance together in a
stack.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from fedloom.config.rates import CONSTANT
from fedloom.data.dataset import Dataset, Samples
from fedloom.errors import InvalidValue
from fedloom.flat.layout import Layout, Unit
from fedloom.flat.module import Batch, FlatModule, LossFn, data_loss, head_loss
from fedloom.flat.module import Context as Context
from fedloom.local.batches import ClientLoader, LockStep, lock_steps
from fedloom.local.changed_loss import ChangedLoss, LossChange
from fedloom.local.optimizer import Correction as Correction
from fedloom.local.optimizer import GradientFn as GradientFn
from fedloom.local.optimizer import LocalOptimizer, StepRates
from fedloom.models.structure import head_name
from fedloom.round import Round
from fedloom.state.store import Memory
from fedloom.training import Passes, PassOptions, Training

Step = Callable[[dict[str, Tensor], Batch], Tensor]
"""(state, batch) -> loss `[k]`; it changes the tensors of the state, `[k, ...]`, in place."""

GroupLosses = list[tuple[LockStep, list[Tensor]]]
"""The losses `[g]` of the steps that some clients took together."""

FEATURES_AT_ONCE, EVALUATED_AT_ONCE = 256, 500
"""Samples per forward pass that computes features, or losses."""


class Trained(NamedTuple):
    """Result of local training: the models `[k, P]`, the number of steps `[k]` and the mean loss
    over them `[k]`.
    """

    model: Tensor
    steps: Tensor
    loss: Tensor


class Cohort:
    """The clients that train together, as the client half of a method sees them.

    Attributes:
        clients: Their k numbers.
        round: The round, with its learning rate and seed.
        layout: Which slices of a row are which tensors of the model.
        training: Settings of local SGD.
        memory: Named tensors that each client keeps from round to round.
        sizes: Numbers of training samples, `[k]`.
        uploads: True for each client that was selected to upload, `[k]`.
        metrics: Named figures `[k]` to be recorded; `fit` adds `training_loss`.
        flat_module: The architecture over rows.
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
        self.uploads = torch.tensor(
            [True] * len(self.clients) if uploads is None else list(uploads)
        )
        self.metrics: dict[str, Tensor] = {}
        self._initial: Tensor | None = None
        self._dataset = dataset
        self._samples = samples
        self._loaders = [ClientLoader(client_samples, dataset) for client_samples in samples]

    def stream(self, purpose: str) -> list[torch.Generator]:
        """Return a fresh random stream for each client, named by the purpose, the round and the
        client.
        """
        return [self.round.stream(purpose, client) for client in self.clients]

    def subset(
        self,
        choose: Callable[[Samples, torch.Generator], Samples],
        purpose: str,
        *,
        lasting: bool = False,
    ) -> "Cohort":
        """Return the same clients with a part of their data.

        Args:
            choose: Takes a client's samples and its random stream to the chosen samples.
            purpose: Name of the stream.
            lasting: Choose the same samples in every round.
        """
        round = replace(self.round, number=0) if lasting else self.round
        streams = [round.stream(purpose, client) for client in self.clients]
        chosen = [
            choose(samples, generator)
            for samples, generator in zip(self._samples, streams, strict=True)
        ]
        return self._with(chosen)

    def _with(self, samples: Sequence[Samples]) -> "Cohort":
        shared = self._dataset, self.flat_module, self.training, self.round, self.memory
        cohort = Cohort(self.clients, samples, *shared, self.uploads.tolist())
        cohort.metrics = self.metrics
        cohort._initial = self._initial
        return cohort

    def with_loss(self, change: LossChange, context: Mapping[str, Tensor]) -> "Cohort":
        """Return the same clients, who train on `change(loss, net, batch, context)` instead of
        every loss.

        Args:
            change: Takes a client's loss on a batch, its model with the batch's `features` and
                `outputs`, the batch and the client's rows of `context` to the loss to train on, a
                scalar.
            context: Named tensors `[k, ...]`.
        """
        changed = copy.copy(self)
        changed.flat_module = cast(FlatModule, ChangedLoss(self.flat_module, change, context))
        return changed

    @property
    def samples(self) -> list[Samples]:
        """Training samples of each client, as the data set stores them."""
        return list(self._samples)

    def in_order(self, size: int = FEATURES_AT_ONCE) -> list[Iterator[Batch]]:
        """Return for each client its training samples as they lie and as the model takes them, in
        batches `[b, ...]`.

        Args:
            size: Samples of a batch; the last one may be shorter.
        """

        def batches(samples: Samples) -> Iterator[Batch]:
            for start in range(0, len(samples), size):
                batch = samples[start : start + size]
                yield Batch(self._dataset.prepare(batch.inputs), batch.labels, start // size)

        return [batches(samples) for samples in self._samples]

    @torch.no_grad()
    def features(self, rows: Tensor) -> list[Tensor]:
        """Return what enters the classifier of each client's model, `[n, d]` for its n training
        samples in their order.

        The models are in evaluation mode; `labels` are the targets of the same samples.

        Args:
            rows: One model a client, `[k, P]`.
        """
        nets = [self.flat_module.net.at(row) for row in rows]
        pairs = zip(nets, self.in_order(), strict=True)
        return [
            torch.cat([net.both(batch.inputs)[0].flatten(1) for batch in batches])
            for net, batches in pairs
        ]

    def class_means(self, features: Sequence[Tensor]) -> Tensor:
        """Return the mean of each client's features by class, `[k, Y, d]`; 0 for a class that a
        client lacks.

        Args:
            features: Those of each client's training samples, `[n, d]`, as `features` returns them.
        """
        means = []
        for client_features, labels in zip(features, self.labels, strict=True):
            members = (labels == torch.arange(self.classes, device=labels.device).unsqueeze(1)).to(
                client_features
            )
            means.append(members @ client_features / members.sum(1, keepdim=True).clamp_min(1))
        return torch.stack(means)

    def require_outputs_of_head(self, method: str) -> None:
        """Raise `InvalidValue` unless the model's outputs are those of its classifier, which
        `method` changes or deploys. No sample is read.
        """
        like = self._loaders[0].like
        inputs = like.new_empty(2, *like.shape[1:])
        numbers = torch.zeros_like(inputs)
        if inputs.is_floating_point():
            numbers = torch.linspace(0, 1, inputs.numel()).to(inputs).view(inputs.shape)
        if not self.flat_module.head_gives_outputs(numbers):
            remedy = "end its forward method with the classifier, and return a tensor"
            raise InvalidValue(
                f"{method} needs a model whose outputs are those of its classifier "
                f"{head_name(self.module)!r}, and {type(self.module).__name__} returns others: {remedy}"
            )

    def for_classifier(self, rows: Tensor) -> "tuple[Cohort, LossFn]":
        """Return clients and a loss with which to train only the classifiers of models `[k, P]`.

        The clients' inputs are replaced by the features that enter the classifier, so that one
        forward pass serves every epoch. Where features are not a function of each sample alone, or
        this saves no time, they are these clients and the data loss.
        """
        # Batched products through all linear layers take less time (0.85) than the classifier alone
        # under vmap.
        products = self.flat_module.heeds_share(data_loss)
        if products or self.training.augmentation != "none":
            return self, data_loss
        featured = []
        for row, samples, batches in zip(
            rows.split(1), self._samples, self.in_order(), strict=True
        ):
            blocks = [
                self.flat_module.features(row, batch.inputs.unsqueeze(0)) for batch in batches
            ]
            features = [block[0] for block in blocks if block is not None]
            if len(features) < len(blocks):
                return self, data_loss
            featured.append(Samples(torch.cat(features), samples.labels))
        return self._with(featured), head_loss

    @property
    def labels(self) -> list[Tensor]:
        """Training labels of each client."""
        return [samples.labels for samples in self._samples]

    @property
    def label_counts(self) -> Tensor:
        """Numbers of training samples of each class at each client, `[k, Y]`."""
        # bincount would wait for the device to know how many there are.
        classes = [torch.arange(self.classes, device=labels.device) for labels in self.labels]
        pairs = zip(classes, self.labels, strict=True)
        return torch.stack(
            [(labels.flatten() == numbers.unsqueeze(1)).sum(1) for numbers, labels in pairs]
        )

    @property
    def classes(self) -> int:
        return self._dataset.classes

    @property
    def module(self) -> nn.Module:
        """The architecture, with the weights that the task starts from."""
        return self.flat_module.original

    @property
    def initial(self) -> Tensor:
        """The model that the method starts from, `[1, P]`: a client's values of slices that it was
        never sent. Within `stages` it is the model that the stage before left.
        """
        return self.flat_module.initial.unsqueeze(0) if self._initial is None else self._initial

    def start_from(self, initial: Tensor) -> None:
        """Set the model that the method starts from, `[1, P]`."""
        self._initial = initial

    def _passes(self, **options: Unpack[PassOptions]) -> Passes:
        """Return the length of a local training, with a method's values in place of the settings."""
        smallest = self.flat_module.smallest_batch(self._loaders[0].like)
        return self.training.passes(**options, smallest=smallest)

    def _lock_steps(
        self,
        passes: Passes,
        *,
        purpose: str = "batches",
        shuffle: bool = True,
        active: Tensor | None = None,
        in_step: bool = True,
        pad: bool = False,
    ) -> Iterator[LockStep]:
        """Yield the batches of local training, of all clients together or, where sizes differ, of
        some and then of others.

        `in_step` keeps clients at the same step, so that `Batch.step` counts their steps; otherwise
        it only marks the first. `pad` allows padding, for steps that use `Batch.share`. Without
        `shuffle`, samples come as they lie.
        """
        takes_part = [True] * len(self.clients) if active is None else active.tolist()
        orders = [
            passes.orders(len(samples), self.round.stream(purpose, client) if shuffle else None)
            if taking
            else iter(())
            for taking, client, samples in zip(takes_part, self.clients, self._samples, strict=True)
        ]
        augmented = self.training.augmentation == "flip_crop"
        noises = self.stream(f"{purpose}/augmentation") if augmented else [None] * len(orders)
        return lock_steps(self._loaders, orders, noises, in_step=in_step, pad=pad)

    def gradient(
        self,
        rows: Tensor,
        batch: Batch,
        loss_fn: LossFn = data_loss,
        context: Context | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return loss `[k]` and gradient `[k, T]` of each client's objective at its row of `rows
        [k, P]`.

        The model is in training mode: its statistics in `rows[:, T:]` are updated. The next call
        overwrites the gradient.
        """
        return self.flat_module.gradient(rows, batch, loss_fn, context or {})

    def partial_gradient(
        self,
        rows: Tensor,
        batch: Batch,
        loss_fn: LossFn = data_loss,
        context: Context | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the same inside `each_batch(..., only=unit)`, with the gradient of that unit's
        slices alone, side by side.
        """
        return self.flat_module.partial_gradient(rows, batch, loss_fn, context or {})

    def fit(
        self,
        start: Tensor,
        *,
        loss_fn: LossFn = data_loss,
        gradient_fn: GradientFn | None = None,
        correction: Correction | None = None,
        context: Context | None = None,
        state: Mapping[str, Tensor] | None = None,
        only: Unit | None = None,
        purpose: str = "batches",
        learning_rate: float | Tensor | None = None,
        active: Tensor | None = None,
        pad: bool = False,
        **options: Unpack[PassOptions],
    ) -> Trained:
        """Train by local SGD (FedAvg, algorithm 1).

        Each step takes a batch and its gradient, then applies `correction`, clipping, weight decay
        and momentum.

        Args:
            start: Models to start from, `[k, P]`; they stay as they are.
            loss_fn: Loss of one client on a batch; by default that of the task's objective.
            gradient_fn: Gives loss and gradient in place of `loss_fn`'s, with `Cohort.gradient` at
                any weights.
            correction: Takes weights, gradient and context to the gradient to use.
            context: Named tensors `[k, ...]` that these three functions are given.
            state: More of them, which they change in place from step to step, such as
                `context["shift"].sub_(...)`.
            only: Slices of the parameters that move; by default all.
            purpose: Name of the streams that shuffle the samples. A second training in a round
                takes another.
            learning_rate: Instead of the round's; one for all clients or one each, `[k]`.
            active: Clients that train, bool `[k]`; by default all.
            pad: Promise that `gradient_fn` reads its batch through `gradient` alone, so that short
                batches may be padded.
            **options: `epochs`, `steps`, `batch_size` or `drop_last` in place of the settings of
                `training`.

        Returns:
            The trained models, the number of steps and the mean loss of each client, NaN without a
            step.
        """
        settings = self.training
        rate = self.round.learning_rate if learning_rate is None else learning_rate
        passes = self._passes(**options)
        totals = (
            torch.zeros_like(self.sizes)
            if settings.local_schedule == CONSTANT
            else passes.count(self.sizes)
        )
        rates = StepRates(rate, settings.local_schedule, totals)
        weights = start.clone()
        state = dict(state or {})
        moving = {"weights": weights, **state}
        if settings.optimizer == "sgd" and settings.momentum:
            moving["velocity"] = torch.empty_like(weights[:, : self.layout.trainable])
        steps: GroupLosses = []
        self.flat_module.train_only(only)
        try:
            optimizer = LocalOptimizer(
                self.flat_module, settings, rates, weights, only, loss_fn, gradient_fn, correction
            )
            for group in self._lock_steps(
                passes,
                purpose=purpose,
                active=active,
                in_step=gradient_fn is not None or loss_fn is not data_loss,
                pad=(pad or gradient_fn is None) and self.flat_module.heeds_share(loss_fn),
            ):
                taken = group.take(moving)
                client_context = {
                    **group.take(context or {}),
                    **{name: taken[name] for name in state},
                }
                steps.append((group, optimizer.take(group, taken, client_context)))
                group.put(moving, taken)
        finally:
            self.flat_module.train_only(None)
        counts, loss = _counts_and_loss(steps, weights)
        self.metrics["training_loss"] = loss
        return Trained(weights, counts, loss)

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
        """Run `step` on every batch, for methods whose inner loop is not that of `fit`.

        Args:
            step: Takes the state and a batch to the loss, `[k]`; it changes the state in place. It
                is given only the clients that have the batch, so all that belongs to a client goes
                into the state.
            state: Named tensors `[k, ...]`.
            only: Slices whose gradient is taken; it is zero elsewhere.
            purpose: Name of the streams that shuffle the samples.
            in_order: Pass once over all samples, as they lie.
            active: Clients that take steps, bool `[k]`; by default all.
            pad: Promise that `step` reads its batch through `gradient` alone, so that short batches
                may be padded.

        Returns:
            The mean loss of each client's steps, `[k]`; NaN without a step.
        """
        steps: GroupLosses = []
        self.flat_module.train_only(only)
        try:
            for group in self._lock_steps(
                self._passes(epochs=1, drop_last=False) if in_order else self._passes(),
                purpose=purpose,
                shuffle=not in_order,
                active=active,
                pad=pad and self.flat_module.heeds_share(data_loss),
            ):
                taken = group.take(state)
                steps.append((group, [step(taken, batch) for batch in group.batches]))
                group.put(state, taken)
        finally:
            self.flat_module.train_only(None)
        rows = self.initial.expand(len(self.clients), -1)
        return _counts_and_loss(steps, rows)[1]

    def batches(self, purpose: str = "batches") -> Iterator[Batch]:
        """Yield all batches of local training."""
        for group in self._lock_steps(self._passes(), purpose=purpose):
            yield from group.batches

    @torch.no_grad()
    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean loss `[k]` of each row of `rows [k, P]` on its client's samples, in
        evaluation mode.
        """
        objective, losses = self._dataset.objective, []
        for row, samples, batches in zip(
            rows, self._samples, self.in_order(EVALUATED_AT_ONCE), strict=True
        ):
            pairs = (
                (self.flat_module.outputs(row, batch.inputs), batch.labels) for batch in batches
            )
            statistics = [objective.statistics(*pair) for pair in pairs]
            counts = {
                name: torch.cat([values[name].double() for values in statistics])
                for name in statistics[0]
            }
            totals = objective.add_up(counts, lambda values: values.sum(0, keepdim=True))
            totals["samples"] = next(iter(totals.values())).new_tensor([len(samples)])
            losses.append(objective.figures(totals)["loss"][0])
        return torch.stack(losses).to(rows)


def _counts_and_loss(steps: GroupLosses, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of steps and the mean loss of each client.

    Args:
        steps: The losses of the steps.
        rows: A row for each client, `[k, P]`, for the type and the device of the losses.

    Returns:
        Numbers `[k]` and losses `[k]`, which are NaN for a client without a step.
    """
    counts = torch.zeros(len(rows), dtype=torch.int64)
    for group, losses in steps:
        counts[group.members] += len(losses)
    if steps and all(group.clients is None for group, _ in steps):
        return counts, torch.stack([loss for _, losses in steps for loss in losses]).mean(0)
    total = rows.new_zeros(len(rows))
    for group, losses in steps:
        total[group.members] += torch.stack(losses).sum(0)
    return counts, total / counts.to(total)
