"""Several models that train in lock step: one batched forward and one backward for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedloom.flat.compiled import CompiledGradient
from fedloom.flat.device import moved
from fedloom.flat.dropout import dropout_of
from fedloom.flat.layout import Layout, TensorSlice
from fedloom.flat.linear_chain import FoldedSGD, backward, linear_layers, matrix
from fedloom.flat.module import (
    PLAIN,
    Batch,
    CalledNet,
    FlatModule,
    FoldedStep,
    LossFn,
    Rows,
    Shortcuts,
    data_loss,
    piece,
)
from fedloom.flat.precision import stacked_autocast
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.training import Training


class StackedModule(FlatModule):
    """The task's architecture over k rows at once, under the interface of `FlatModule`, with `[k, ...]` for its `[1, ...]`.

    The loss, written for one client, runs under `vmap` over the rows; the summed loss has one backward. Nothing is ever
    mixed between rows; frozen parameters are there once for all of them. `features` and `outputs` still take one row at a time.
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
        self._places: tuple[Tensor, Tensor] | None = None  # some clients' places, and the same beside the counts
        self._streams: Sequence[torch.Generator] = ()

    def begin(self, clients: int, streams: Sequence[torch.Generator]) -> None:
        """Another cohort of `clients` clients. `streams`, one a client, are what dropout draws from; without them no layer may
        draw."""
        self._streams = streams
        self._counts = self.layout.flatten_integers(self.module).repeat(clients, 1)
        if len(self._gradient) < clients:
            self._gradient = self._gradient.new_zeros(clients, self.layout.trainable)

    def folded(self, settings: Training, rate: float) -> FoldedStep | None:
        whole = len(self._moving) == len(self._slices)
        return (
            FoldedSGD(self._layers, settings, rate) if self._layers and whole and FoldedSGD.covers(settings) else None
        )

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
        """The loss `[k]`; its gradient by what moves is written `into [k, T]`."""

        def keep(part: TensorSlice, delta: Tensor, x: Tensor) -> None:
            if part in self._moving:
                matrix(into, part).baddbmm_(delta.mT, x, beta=0)

        return backward(self._layers, rows, batch, keep)

    def tensor_gradients(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Mapping[str, Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        if self.heeds_share(loss_fn):
            found = self._gradient[: len(rows)]
            return self._by_layers(rows, batch, found), self.pieces(found)
        trained = {part.name: piece(rows, part).detach().requires_grad_() for part in self._moving}
        names = trained.keys()
        others = {part.name: piece(rows, part).detach() for part in self._slices if part.name not in names}
        # Under vmap batch norm moves its statistics in place only where they are one contiguous block; a row's slice is none,
        # and the move would be lost without a word.
        statistics = {part.name: piece(rows, part).detach().contiguous() for part in self._statistics}
        counts = self._counts_for(batch.clients)
        integers = {part.name: counts[:, part.slice].view(len(rows), *part.shape).to(part.dtype)
                    for part in self.layout.integer_slices}  # fmt: skip

        held = {**others, **statistics, **integers}
        compiled = self._compiled_for(batch, loss_fn)
        if compiled is not None:
            losses, gradients, after = compiled(trained, held, batch.inputs, batch.labels, stacked=True)
            statistics = {name: after[name] for name in statistics}
            integers = {name: after[name] for name in integers}
        else:
            losses, gradients = self._by_vmap(trained, held, batch, loss_fn, context)
        for part in self._statistics:
            piece(rows, part).detach().copy_(statistics[part.name])
        self._keep_counts(batch.clients, integers)
        return losses.detach().to(rows), gradients

    def _by_vmap(
        self,
        trained: dict[str, Tensor],
        held: dict[str, Tensor],
        batch: Batch,
        loss_fn: LossFn,
        context: Mapping[str, Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Losses `[k]` and gradients; what layers move of `held` moves in place."""

        def loss_of_one(
            tensors: Mapping[str, Tensor], inputs: Tensor, labels: Tensor, own: Mapping[str, Tensor]
        ) -> Tensor:
            net = CalledNet(self.module, self.layout, tensors, self.frozen, self.objective)
            return loss_fn(net, Batch(inputs, labels, batch.step), own)

        with dropout_of(self._drawing(batch.clients)), stacked_autocast(self.autocast):
            losses = vmap(loss_of_one)({**trained, **held}, batch.inputs, batch.labels, dict(context))
        return losses, torch.autograd.grad(losses.sum(), list(trained.values()), materialize_grads=True)

    def _compiled_for(self, batch: Batch, loss_fn: LossFn) -> CompiledGradient | None:
        """As for one model; and all of the cohort take the step, with no layer that draws."""
        apart = batch.clients is not None or bool(self._streams)
        return None if apart else super()._compiled_for(batch, loss_fn)

    def _drawing(self, clients: Rows | None) -> Sequence[torch.Generator]:
        if clients is None or not self._streams:
            return self._streams
        return [self._streams[place] for place in torch.arange(len(self._streams))[clients].tolist()]

    def _here(self, clients: Rows) -> Rows:
        """The clients' row numbers on the device of the counts, copied there once for all steps of the same clients."""
        if not isinstance(clients, Tensor):
            return clients
        if self._places is None or self._places[0] is not clients:
            self._places = clients, moved(clients, self._counts_for(None).device)
        return self._places[1]

    # --- integer buffers, which batch norm counts its batches in ---

    def _counts_for(self, clients: Rows | None) -> Tensor:
        if self._counts is None:
            raise RuntimeError("begin a cohort first")
        return self._counts if clients is None else self._counts[self._here(clients)]

    def _keep_counts(self, clients: Rows | None, integers: Mapping[str, Tensor]) -> None:
        if not integers or self._counts is None:
            return
        flat = [integers[part.name].reshape(-1, part.stop - part.start) for part in self.layout.integer_slices]
        self._counts[slice(None) if clients is None else self._here(clients)] = torch.cat(
            [part.long() for part in flat], 1
        )

    def load_integers(self, integers: Tensor) -> None:
        self._counts = integers.clone()

    def integers(self) -> Tensor:
        return self._counts_for(None).clone()
