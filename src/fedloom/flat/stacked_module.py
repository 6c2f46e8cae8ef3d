"""Several models in lock step, with one batched forward and backward pass."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.func import vmap

from fedloom.common.device import moved
from fedloom.common.training import Training
from fedloom.flat.layout import TensorSlice
from fedloom.flat.linear_chain import (
    FoldedSGD,
    LinearLayer,
    add_gradient,
    backward,
    linear_layers,
    views,
)
from fedloom.flat.module import (
    Batch,
    Context,
    FlatModule,
    FoldedStep,
    LossFn,
    Rows,
    data_loss,
    head_loss,
    piece,
)
from fedloom.flat.population import empty_rows
from fedloom.flat.vmap_modes import client_dropout, stacked_autocast
from fedloom.models.structure import head_name


class StackedModule(FlatModule):
    """The task's architecture with k rows as weights, `[k, P]`.

    It has the interface of `FlatModule`, with `[k, ...]` instead of `[1, ...]`. The loss of one
    client runs under `vmap` over the rows, with one backward pass of the sum. Rows are independent
    of each other, and share frozen parameters. `features` and `outputs` accept one row at a time.
    """

    _counts: Tensor  # integer buffers, `[k, Z]`: batch norm counts its batches
    # Selected rows, and their copy on the device of the counts.
    _moved_rows: tuple[Tensor, Tensor] | None = None
    _streams: Sequence[torch.Generator] = ()

    @cached_property
    def _layers(self) -> list[LinearLayer]:
        """The layers of a chain of linear layers. Empty for other modules."""
        linear = self.shortcuts.linear and self.objective.plain_cross_entropy
        return linear_layers(self.module, self.layout) if linear else []

    def begin(self, clients: int, streams: Sequence[torch.Generator]) -> None:
        """Begin a cohort.

        Args:
            clients: Number of clients.
            streams: Random stream of each client for dropout. Without streams, layers must not draw
                random numbers.
        """
        self._streams = streams
        self._counts = self.layout.flatten_integers(self.module).expand(clients, -1).clone()
        if len(self._gradient) < clients:
            self._gradient = empty_rows(clients, self.layout.trainable, self._gradient).zero_()

    def folded(self, settings: Training, rate: float) -> FoldedStep | None:
        all_train = len(self._trained_slices) == len(self._slices)
        folds = self._layers and all_train and FoldedSGD.covers(settings)
        return FoldedSGD(self._layers, settings, rate) if folds else None

    def uses_share(self, loss_fn: LossFn) -> bool:
        return self.autocast is None and bool(self._layers_of(loss_fn))

    def _layers_of(self, loss_fn: LossFn) -> list[LinearLayer]:
        """Return the linear layers between the inputs of a loss and the logits.

        These are all layers of a chain, or its classifier for a loss on features.
        """
        if loss_fn is data_loss:
            return self._layers
        return self._classifier if loss_fn is head_loss else []

    @cached_property
    def _classifier(self) -> list[LinearLayer]:
        """The last layer of a chain, if it is the model's classifier."""
        weight = f"{head_name(self.module)}.weight".lstrip(".")
        return [
            layer
            for layer in self._layers[-1:]
            if layer.weight.name == weight and not layer.rectified
        ]

    def gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Tensor]:
        if not self.uses_share(loss_fn):
            return super().gradient(rows, batch, loss_fn, context)
        buffer = self._gradient[: len(rows)]
        if len(self._trained_slices) < len(self._slices):
            buffer.zero_()
        return self._by_layers(rows, batch, loss_fn, buffer), buffer

    def _by_layers(self, rows: Tensor, batch: Batch, loss_fn: LossFn, into: Tensor) -> Tensor:
        """Return the loss `[k]`, and write the gradient of trained parameters `into [k, T]`."""
        layers = self._layers_of(loss_fn)
        trained = {entry.name for entry in self._trained_slices}
        needed = (
            index for index, layer in enumerate(layers) if not trained.isdisjoint(layer.names)
        )

        gradients = views(layers, into)

        def write(entry: TensorSlice, delta: Tensor, x: Tensor | None) -> None:
            if entry.name in trained:
                add_gradient(gradients[entry.name], delta, x, beta=0)

        lowest = min(needed, default=len(layers))
        return backward(layers, views(layers, rows), batch, write, lowest)

    def tensor_gradients(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Sequence[Tensor]]:
        if self.uses_share(loss_fn):
            buffer = self._gradient[: len(rows)]
            return self._by_layers(rows, batch, loss_fn, buffer), self.pieces(buffer)
        trained = {
            entry.name: piece(rows, entry).detach().requires_grad_()
            for entry in self._trained_slices
        }
        fixed = {
            entry.name: piece(rows, entry).detach()
            for entry in self._slices
            if entry.name not in trained
        }
        # Layers update their buffers in place. Under vmap, batch norm silently loses the update
        # unless its statistics are contiguous, and slices of rows are not.
        buffers = self.layout.slices[len(self._slices) :]
        statistics = {entry.name: piece(rows, entry).detach().contiguous() for entry in buffers}
        clients = self._on_device(batch.clients)
        counters = self.layout.integer_slices
        counts = self._counts[clients]
        integers = {entry.name: piece(counts, entry).to(entry.dtype) for entry in counters}

        def client_loss(
            tensors: Context, inputs: Tensor, labels: Tensor, client_context: Context
        ) -> Tensor:
            net = self.net.with_tensors(tensors)
            return loss_fn(net, Batch(inputs, labels, batch.step), client_context)

        tensors = {**trained, **fixed, **statistics, **integers}
        with client_dropout(self._client_streams(batch.clients)), stacked_autocast(self.autocast):
            losses = vmap(client_loss)(tensors, batch.inputs, batch.labels, dict(context))
        gradients = torch.autograd.grad(
            losses.sum(), list(trained.values()), materialize_grads=True
        )
        for entry in buffers:
            piece(rows, entry).detach().copy_(statistics[entry.name])
        if counters:
            columns = [integers[entry.name].reshape(len(rows), -1).long() for entry in counters]
            self._counts[clients] = torch.cat(columns, 1)
        return losses.detach().to(rows), gradients

    def _client_streams(self, clients: Rows | None) -> Sequence[torch.Generator]:
        if clients is None or not self._streams:
            return self._streams
        return [self._streams[row] for row in torch.arange(len(self._streams))[clients].tolist()]

    def _on_device(self, clients: Rows | None) -> Rows:
        """Return the row numbers of the clients on the device of the counts.

        They are copied once for all steps of the same clients.
        """
        if not isinstance(clients, Tensor):
            return slice(None) if clients is None else clients
        if self._moved_rows is None or self._moved_rows[0] is not clients:
            self._moved_rows = clients, moved(clients, self._counts.device)
        return self._moved_rows[1]

    def load_integers(self, integers: Tensor) -> None:
        self._counts = integers.clone()

    def integers(self) -> Tensor:
        return self._counts.clone()
