"""A cohort: k clients with their data, memory and models, `[k, P]`, and their local training.

The code of clients has a leading client axis. It runs with k = 1 if clients train one after another
(in this process, a worker or a real site), and with k > 1 if they train in lock step in a stack.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from fedloom.common.errors import InvalidValue
from fedloom.common.rates import CONSTANT
from fedloom.common.round import Round
from fedloom.common.training import Passes, PassOptions, Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.flat.layout import Layout, Unit
from fedloom.flat.module import Batch, FlatModule, LossFn, data_loss, head_loss
from fedloom.flat.module import Context as Context
from fedloom.flat.population import empty_rows
from fedloom.local.batches import ClientLoader, LockStep, lock_steps
from fedloom.local.changed_loss import ChangedLoss, LossChange
from fedloom.local.optimizer import Correction as Correction
from fedloom.local.optimizer import GradientFn as GradientFn
from fedloom.local.optimizer import LocalOptimizer, StepRates
from fedloom.models.structure import head_name
from fedloom.state.store import Memory

Step = Callable[[dict[str, Tensor], Batch], Tensor]
"""(state, batch) -> loss `[k]`. It changes the tensors of the state, `[k, ...]`, in place."""

GroupLosses = list[tuple[LockStep, list[Tensor]]]
"""Groups of clients in lock step, with the losses `[g]` of their steps."""

FEATURES_AT_ONCE = 256
EVALUATED_AT_ONCE = 500
"""Number of samples in a forward pass for features, and in one for losses."""


class Trained(NamedTuple):
    """Result of local training.

    Attributes:
        model: Trained models, `[k, P]`.
        steps: Number of steps, `[k]`.
        loss: Mean loss over the steps, `[k]`.
    """

    model: Tensor
    steps: Tensor
    loss: Tensor


class Cohort:
    """Clients that train in lock step. The client side of a method receives them.

    Attributes:
        clients: Numbers of the k clients.
        round: The round, with its learning rate and seed.
        layout: Positions of the model's tensors in a row.
        training: Settings of local training.
        memory: Tensors by name that each client stores from round to round.
        sizes: Numbers of training samples, `[k]`.
        uploads: True for clients that upload, `[k]`.
        metrics: Figures for the records by name, `[k]`. `fit` adds `training_loss`.
        work: Share of the steps of a local training that each client completes, `[k]`.
        flat_module: The architecture with rows as weights.
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
        self.work = torch.ones(len(self.clients), dtype=torch.float64)
        self._initial: Tensor | None = None
        self._dataset = dataset
        self._samples = samples
        self._loaders = [ClientLoader(client_samples, dataset) for client_samples in samples]

    def stream(self, purpose: str) -> list[torch.Generator]:
        """Return a new random stream for each client. It depends on purpose, round and client."""
        return [self.round.stream(purpose, client) for client in self.clients]

    def subset(
        self,
        choose: Callable[[Samples, torch.Generator], Samples],
        purpose: str,
        *,
        lasting: bool = False,
    ) -> "Cohort":
        """Return the same clients with a subset of their samples.

        Args:
            choose: (samples of a client, random stream) -> chosen samples.
            purpose: Name of the stream.
            lasting: True to use the same streams in every round.

        Returns:
            A new cohort. The memory and the architecture are shared with this one.
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
        cohort.work = self.work
        cohort._initial = self._initial
        return cohort

    def with_loss(self, change: LossChange, context: Mapping[str, Tensor]) -> "Cohort":
        """Return the same clients with each loss replaced by `change(loss, net, batch, context)`.

        Args:
            change: (loss of a client on a batch, its model with the batch's `features` and
                `outputs`, the batch, the client's rows of `context`) -> new loss, a scalar.
            context: Tensors for `change` by name, `[k, ...]`.

        Returns:
            A new cohort that shares samples and memory with this one.
        """
        changed = copy.copy(self)
        changed.flat_module = cast(FlatModule, ChangedLoss(self.flat_module, change, context))
        return changed

    def with_work(self, shares: Tensor) -> "Cohort":
        """Return the same clients, each of which ends a local training after a share of its steps.

        Passes over all samples in stored order are not shortened.

        Args:
            shares: Share of the steps of each client, at least one step, `[k]`.
        """
        changed = copy.copy(self)
        changed.work = shares
        return changed

    @property
    def samples(self) -> list[Samples]:
        """Training samples of each client, as the data set stores them."""
        return list(self._samples)

    def in_order(self, size: int = FEATURES_AT_ONCE) -> list[Iterator[Batch]]:
        """Return each client's prepared training samples in stored order, in batches `[b, ...]`.

        Args:
            size: Number of samples in a batch. The last batch may be shorter.
        """

        def batches(samples: Samples) -> Iterator[Batch]:
            for start in range(0, len(samples), size):
                batch = samples[start : start + size]
                yield Batch(self._dataset.prepare(batch.inputs), batch.labels, start // size)

        return [batches(samples) for samples in self._samples]

    @torch.no_grad()
    def features(self, rows: Tensor) -> list[Tensor]:
        """Return the inputs of the classifier for each client's n training samples, `[n, d]`.

        They are computed in evaluation mode, in the order of `labels`.

        Args:
            rows: One model per client, `[k, P]`.
        """
        nets = [self.flat_module.net.at(row) for row in rows]
        pairs = zip(nets, self.in_order(), strict=True)
        return [
            torch.cat([net.both(batch.inputs)[0].flatten(1) for batch in batches])
            for net, batches in pairs
        ]

    def class_means(self, features: Sequence[Tensor]) -> Tensor:
        """Return the mean of each client's features by class, `[k, Y, d]`.

        It is 0 for classes without samples.

        Args:
            features: Features of each client's training samples, `[n, d]` (see `features`).
        """
        means = []
        for client_features, labels in zip(features, self.labels, strict=True):
            members = (labels == torch.arange(self.classes, device=labels.device).unsqueeze(1)).to(
                client_features
            )
            means.append(members @ client_features / members.sum(1, keepdim=True).clamp_min(1))
        return torch.stack(means)

    def require_outputs_of_head(self, method: str) -> None:
        """Raise `InvalidValue` unless the outputs of the model equal the outputs of its classifier.

        The check reads no samples. `method` is the method that changes or deploys the classifier.
        """
        empty = self._loaders[0].empty_inputs
        inputs = empty.new_empty(2, *empty.shape[1:])
        numbers = torch.zeros_like(inputs)
        if inputs.is_floating_point():
            numbers = torch.linspace(0, 1, inputs.numel()).to(inputs).view(inputs.shape)
        if not self.flat_module.head_gives_outputs(numbers):
            remedy = "end its forward method with the classifier, and return a tensor"
            raise InvalidValue(
                f"{method} needs a model that returns the outputs of its classifier "
                f"{head_name(self.module)!r}, but {type(self.module).__name__} returns other "
                f"values: {remedy}"
            )

    def for_classifier(self, rows: Tensor) -> "tuple[Cohort, LossFn]":
        """Return clients and a loss for training only the classifiers of models.

        The inputs of the clients are replaced by features (the inputs of the classifier), so that
        one forward pass is enough for all epochs. If features depend on more than one sample, or if
        this saves no time, the clients and the loss are unchanged.

        Args:
            rows: One model per client, `[k, P]`.
        """
        # Batched products through all linear layers take 0.85 of the time of a classifier under
        # vmap.
        layers = self.flat_module.uses_share(data_loss)
        if layers and not self.flat_module.uses_share(head_loss):
            return self, data_loss
        if self.training.augmentation != "none":
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
        # bincount would wait for the device, because it needs the largest label.
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
        """The architecture, with the initial weights of the task."""
        return self.flat_module.original

    @property
    def initial(self) -> Tensor:
        """The model from which the method starts, `[1, P]`.

        It provides a client's values of slices that the server has never sent. Within `stages` it
        is the result of the previous stage.
        """
        return self.flat_module.initial.unsqueeze(0) if self._initial is None else self._initial

    def start_from(self, initial: Tensor) -> None:
        """Set the model from which the method starts, `[1, P]`."""
        self._initial = initial

    def _passes(self, **options: Unpack[PassOptions]) -> Passes:
        """Return the number of epochs or steps. Options of the method override the settings."""
        smallest = self.flat_module.smallest_batch(self._loaders[0].empty_inputs)
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
        """Yield the batches of local training for groups of clients with equal batch sizes.

        With `in_step`, clients stay at the same step, so that `Batch.step` counts their steps.
        Without it, `Batch.step` is only 0 at the first step. `pad` allows padding, for steps that
        use `Batch.share`. Without `shuffle`, samples stay in stored order.
        """
        trains = [True] * len(self.clients) if active is None else active.tolist()
        orders = []
        for k, client in enumerate(self.clients):
            generator = self.round.stream(purpose, client) if shuffle else None
            share = float(self.work[k]) if shuffle else 1.0
            orders.append(
                passes.orders(len(self._samples[k]), generator, share) if trains[k] else iter(())
            )
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
        """Return the loss and the gradient of each client.

        The model is in training mode: its statistics in `rows[:, T:]` are updated. The next call
        overwrites the gradient.

        Args:
            rows: Weights of the clients, `[k, P]`.
            batch: Samples of the clients, `[k, b, ...]`.
            loss_fn: Loss of one client. By default the loss of the objective.
            context: Tensors for the loss by name, `[k, ...]`.

        Returns:
            Losses `[k]` and gradients `[k, T]`.
        """
        return self.flat_module.gradient(rows, batch, loss_fn, context or {})

    def partial_gradient(
        self,
        rows: Tensor,
        batch: Batch,
        loss_fn: LossFn = data_loss,
        context: Context | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient of the trained slices in `each_batch(..., only=unit)`.

        Args:
            rows: Weights of the clients, `[k, P]`.
            batch: Samples of the clients, `[k, b, ...]`.
            loss_fn: Loss of one client. By default the loss of the objective.
            context: Tensors for the loss by name, `[k, ...]`.

        Returns:
            Losses `[k]`, and gradients of the n numbers in the slices, `[k, n]`.
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

        Each step computes the gradient of a batch, then applies `correction`, clipping, weight
        decay and momentum.

        Args:
            start: Initial models, `[k, P]`. They are not changed.
            loss_fn: Loss of one client on a batch. By default the loss of the objective.
            gradient_fn: Computes loss and gradient in place of `loss_fn`. It may call
                `Cohort.gradient` at any weights.
            correction: (weights, gradient, context) -> corrected gradient.
            context: Tensors for these three functions by name, `[k, ...]`.
            state: Further tensors of the context, which the functions change in place, such as
                `context["shift"].sub_(...)`.
            only: Slices of the parameters to train. By default all.
            purpose: Name of the streams that shuffle the samples. A second training in the same
                round needs another name.
            learning_rate: Replaces the rate of the round: one for all clients or one each, `[k]`.
            active: Clients that train, bool `[k]`. By default all.
            pad: True if `gradient_fn` uses its batch only through `gradient`. Short batches may
                then be padded.
            **options: `epochs`, `steps`, `batch_size` or `drop_last` in place of the settings of
                `training`.

        Returns:
            Trained models, number of steps and mean loss of each client. The loss is NaN without a
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
        weights = empty_rows(len(start), start.shape[1], like=start).copy_(start)
        state = dict(state or {})
        tensors = {"weights": weights, **state}
        if settings.optimizer == "sgd" and settings.momentum:
            tensors["velocity"] = empty_rows(len(start), self.layout.trainable, like=start)
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
                pad=(pad or gradient_fn is None) and self.flat_module.uses_share(loss_fn),
            ):
                taken = group.take(tensors)
                client_context = {
                    **group.take(context or {}),
                    **{name: taken[name] for name in state},
                }
                steps.append((group, optimizer.take(group, taken, client_context)))
                group.put(tensors, taken)
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
        """Run `step` on every batch, for methods with another inner loop than `fit`.

        Args:
            step: (state, batch) -> loss `[k]`. It changes the state in place. It receives only the
                clients of the batch, so all tensors of clients must be in the state.
            state: Tensors by name, `[k, ...]`.
            only: Slices with a gradient. It is zero in other slices.
            purpose: Name of the streams that shuffle the samples.
            in_order: True to pass once over all samples in stored order.
            active: Clients that train, bool `[k]`. By default all.
            pad: True if `step` uses its batch only through `gradient`. Short batches may then be
                padded.

        Returns:
            Mean loss of each client's steps, `[k]`. It is NaN without a step.
        """
        steps: GroupLosses = []
        self.flat_module.train_only(only)
        try:
            for group in self._lock_steps(
                self._passes(epochs=1, drop_last=False) if in_order else self._passes(),
                purpose=purpose,
                shuffle=not in_order,
                active=active,
                pad=pad and self.flat_module.uses_share(data_loss),
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
        """Return the mean loss of each model on its client's samples, `[k]`, in evaluation mode.

        Args:
            rows: One model per client, `[k, P]`.
        """
        objective = self._dataset.objective
        losses = []
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
        steps: Losses of the steps.
        rows: Tensor `[k, ...]` with the type and the device of the losses.

    Returns:
        Numbers `[k]` and losses `[k]`. A loss is NaN without a step.
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
