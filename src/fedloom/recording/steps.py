"""Inputs and outputs of clients and their local steps, to compare with another implementation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm.records import Message
from fedloom.common.fields import Count
from fedloom.flat.module import Batch
from fedloom.local.batches import LockStep
from fedloom.local.cohort import Cohort
from fedloom.parts.pipeline import Work
from fedloom.recording.recorder import Measurement, Recorder, RunContext, recorders
from fedloom.rounds.federation import Federation


@recorders.register("steps")
@dataclass(frozen=True)
class Steps(Recorder):
    """A trace of the inputs and outputs of every client and local step in rounds `begin` to `end`.

    `fedloom paper referee` compares it with the trace of another implementation. A round's file in
    `recorded/` contains, for client 3, the tensors that it receives and sends
    (`steps/3/in/model/fc.weight`, `steps/3/out/...`). For its local step 0 it contains the
    `samples` (positions in the training data), the `loss`, and the weights `before` and `after`.
    `steps/server/end/...` is the server's state after the round. Steps are the steps of
    `Cohort.fit`.
    """

    begin: Count = 1
    end: Count | None = None

    def hook(self, federation: Federation, context: RunContext) -> Callable[[int], Any]:
        trace = _Trace(context)
        object.__setattr__(self, "_trace", trace)  # for `complete`

        def watch(work: Work, cohort: Cohort, inbox: Message) -> Message:
            number = cohort.round.number
            if self.begin <= number <= (self.end or number):
                return trace.watched(work, cohort, inbox)
            return work(cohort, inbox)

        federation.course.watch = watch
        return trace.report

    def complete(self, value: Any, federation: Federation, context: RunContext) -> Any:
        rows = {
            name: row
            for name, row in federation.server_state().items()
            if row.dim() == 1 and not name.endswith(".model")
        }
        rows["model"] = federation.model()
        self._trace.add("server/end", rows)  # type: ignore[attr-defined]
        return value


class _Trace:
    """The tensors of the current round by name, and the samples of its clients."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._begin(0)

    def _begin(self, number: int) -> None:
        self.number = number
        self.sizes: dict[int, int] = {}
        self.tensors: dict[str, Tensor] = {}

    def report(self, number: int) -> Measurement | None:
        """Return the round so far. The server's state after it is added to the same tensors."""
        if number != self.number:
            return None
        self.number = 0  # a repeated round starts a new trace
        value = {"clients": list(self.sizes), "sizes": list(self.sizes.values())}
        return Measurement(value, self.tensors)

    def add(self, name: str, rows: Mapping[str, Tensor]) -> None:
        """Add rows, split into tensors if a row covers the whole model or all its parameters."""
        layout = self.context.task.layout
        for key, row in ((key, row) for key, row in rows.items() if not key.startswith("@")):
            copied = row.detach().clone()
            if row.shape in ((layout.size,), (layout.trainable,)):
                for entry in (entry for entry in layout.slices if entry.stop <= len(row)):
                    self.tensors[f"{name}/{key}/{entry.name}"] = copied[entry.slice].view(
                        entry.shape
                    )
            else:
                self.tensors[f"{name}/{key}"] = copied

    def watched(self, work: Work, cohort: Cohort, inbox: Message) -> Message:
        """Let the clients work, and add their inputs and outputs."""
        if cohort.round.number != self.number:
            self._begin(cohort.round.number)
        names = [self.context.numbers[client] for client in cohort.clients]
        self.sizes |= dict(zip(names, cohort.sizes.tolist(), strict=True))
        numbers = [count() for _ in names]

        def watch(
            step: Callable[[Batch], Tensor], rows: Tensor, group: LockStep
        ) -> Callable[[Batch], Tensor]:
            members = group.members
            batches = count()

            def watched(batch: Batch) -> Tensor:
                weights = rows.clone()
                size = batch.labels.shape[1]
                start = next(batches) * size
                loss = step(batch)
                for k, member in enumerate(members):
                    index = group.orders[k][start : start + size]
                    real = slice(None) if batch.share is None else batch.share[k] > 0
                    samples = self._samples(
                        cohort.clients[member], index[real], batch.labels[k][real]
                    )
                    rows_of_step = {
                        "before": weights[k],
                        "after": rows[k],
                        "loss": loss[k],
                        **samples,
                    }
                    self.add(f"{names[member]}/{next(numbers[member])}", rows_of_step)
                return loss

            return watched

        cohort.flat_module.watch = watch
        try:
            reply = work(cohort, inbox)
        finally:
            cohort.flat_module.watch = None
        for k, name in enumerate(names):
            for direction, message in (("in", inbox), ("out", reply)):
                self.add(
                    f"{name}/{direction}",
                    {key: rows[k if len(rows) > 1 else 0] for key, rows in message.items()},
                )
        return reply

    def _samples(self, client: int, index: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the positions of a batch's samples; empty if the client trains on other data."""
        task = self.context.task
        positions = torch.from_numpy(task.partition[client])
        chosen = positions[index.cpu().clamp(max=len(positions) - 1)]
        return (
            {"samples": chosen}
            if torch.equal(task.train.labels[chosen.to(labels.device)], labels)
            else {}
        )
