"""Several models that train in lock step: one batched forward and one backward for all of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedloom.flat.device import moved
from fedloom.flat.layout import Layout, TensorSlice
from fedloom.flat.linear_chain import FoldedSGD, backward, linear_layers, matrix
from fedloom.flat.module import (
    PLAIN,
    Batch,
    FlatModule,
    FoldedStep,
    LossFn,
    Net,
    Rows,
    Shortcuts,
    data_loss,
    piece,
)
from fedloom.flat.vmap_modes import dropout_of, stacked_autocast
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.training import Training


class StackedModule(FlatModule):
    """The task's architecture over k rows at once, with the interface of `FlatModule` and `[k, ...]` for its `[1, ...]`.

    The loss, written for one client, runs under `vmap` over the rows, with one backward pass of the sum. Rows never mix, and
    share frozen parameters. `features` and `outputs` still take one row at a time.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        shortcuts: Shortcuts = PLAIN,
        autocast: torch.dtype | None = None,
        objective: Objective = CLASSIFICATION,
    ) -> None:
        super().__init__(module, layout, shortcuts, autocast, objective)
        linear = shortcuts.linear and objective.plain_cross_entropy
        self._layers = linear_layers(self.module, layout) if linear else []
        self._statistics = layout.slices[len(self._slices) :]
        self._counts: Tensor | None = None
        self._moved_rows: tuple[Tensor, Tensor] | None = None  # a selection of rows, and its copy on the counts' device
        self._streams: Sequence[torch.Generator] = ()

    def begin(self, clients: int, streams: Sequence[torch.Generator]) -> None:
        """Begin a cohort of `clients` clients. Dropout draws from `streams`, one per client; without them no layer may draw."""
        self._streams = streams
        self._counts = self.layout.flatten_integers(self.module).repeat(clients, 1)
        if len(self._gradient) < clients:
            self._gradient = self._gradient.new_zeros(clients, self.layout.trainable)

    def folded(self, settings: Training, rate: float) -> FoldedStep | None:
        all_move = len(self._moving) == len(self._slices)
        folds = self._layers and all_move and FoldedSGD.covers(settings)
        return FoldedSGD(self._layers, settings, rate) if folds else None

    def heeds_share(self, loss_fn: LossFn) -> bool:
        return bool(self._layers) and loss_fn is data_loss and self.autocast is None

    def gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        if not self.heeds_share(loss_fn):
            return super().gradient(rows, batch, loss_fn, context)
        buffer = self._gradient[: len(rows)]
        if len(self._moving) < len(self._slices):
            buffer.zero_()
        return self._by_layers(rows, batch, buffer), buffer

    def _by_layers(self, rows: Tensor, batch: Batch, into: Tensor) -> Tensor:
        """Return the loss `[k]`, and write its gradient by the parameters that train `into [k, T]`."""

        def keep(entry: TensorSlice, delta: Tensor, x: Tensor) -> None:
            if entry in self._moving:
                matrix(into, entry).baddbmm_(delta.mT, x, beta=0)

        return backward(self._layers, rows, batch, keep)

    def tensor_gradients(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Mapping[str, Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        if self.heeds_share(loss_fn):
            buffer = self._gradient[: len(rows)]
            return self._by_layers(rows, batch, buffer), self.pieces(buffer)
        trained = {entry.name: piece(rows, entry).detach().requires_grad_() for entry in self._moving}
        resting = {entry.name: piece(rows, entry).detach() for entry in self._slices if entry.name not in trained}
        # Under vmap batch norm updates its statistics in place only if they are one contiguous block; a row's slice is none, and
        # the update would be lost without a word.
        statistics = {entry.name: piece(rows, entry).detach().contiguous() for entry in self._statistics}
        counts = self._counts_for(batch.clients)
        integers = {entry.name: counts[:, entry.slice].view(len(rows), *entry.shape).to(entry.dtype)
                    for entry in self.layout.integer_slices}  # fmt: skip

        losses, gradients = self._by_vmap(trained, {**resting, **statistics, **integers}, batch, loss_fn, context)
        for entry in self._statistics:
            piece(rows, entry).detach().copy_(statistics[entry.name])
        self._keep_counts(batch.clients, integers)
        return losses.detach().to(rows), gradients

    def _by_vmap(
        self,
        trained: dict[str, Tensor],
        untrained: dict[str, Tensor],
        batch: Batch,
        loss_fn: LossFn,
        context: Mapping[str, Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return losses `[k]` and gradients. Layers update their buffers among the `untrained` tensors in place."""

        def loss_of_one(
            tensors: Mapping[str, Tensor], inputs: Tensor, labels: Tensor, client_context: Mapping[str, Tensor]
        ) -> Tensor:
            net = Net(self.module, self.layout, self.frozen, self.objective, tensors)
            return loss_fn(net, Batch(inputs, labels, batch.step), client_context)

        with dropout_of(self._drawing(batch.clients)), stacked_autocast(self.autocast):
            losses = vmap(loss_of_one)({**trained, **untrained}, batch.inputs, batch.labels, dict(context))
        return losses, torch.autograd.grad(losses.sum(), list(trained.values()), materialize_grads=True)

    def _drawing(self, clients: Rows | None) -> Sequence[torch.Generator]:
        if clients is None or not self._streams:
            return self._streams
        return [self._streams[row] for row in torch.arange(len(self._streams))[clients].tolist()]

    def _on_device(self, clients: Rows) -> Rows:
        """Return the clients' row numbers on the device of the counts, copied once for all steps of the same clients."""
        if not isinstance(clients, Tensor):
            return clients
        if self._moved_rows is None or self._moved_rows[0] is not clients:
            self._moved_rows = clients, moved(clients, self._counts_for(None).device)
        return self._moved_rows[1]

    # --- integer buffers, in which batch norm counts its batches ---

    def _counts_for(self, clients: Rows | None) -> Tensor:
        if self._counts is None:
            raise RuntimeError("begin a cohort first")
        return self._counts if clients is None else self._counts[self._on_device(clients)]

    def _keep_counts(self, clients: Rows | None, integers: Mapping[str, Tensor]) -> None:
        if not integers or self._counts is None:
            return
        slices = self.layout.integer_slices
        columns = [integers[entry.name].reshape(-1, entry.stop - entry.start).long() for entry in slices]
        self._counts[slice(None) if clients is None else self._on_device(clients)] = torch.cat(columns, 1)

    def load_integers(self, integers: Tensor) -> None:
        self._counts = integers.clone()

    def integers(self) -> Tensor:
        return self._counts_for(None).clone()
