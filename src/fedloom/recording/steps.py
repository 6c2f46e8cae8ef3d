"""Everything that goes into and comes out of clients and their local steps, to be held against another implementation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Exchange, Message, Selection
from fedloom.config.fields import Count
from fedloom.flat.module import Batch
from fedloom.local.batches import LockStep
from fedloom.local.cohort import Cohort
from fedloom.recording.recorder import Measurement, Recorder, RunContext, recorders
from fedloom.round import Round


@recorders.register("steps")
@dataclass(frozen=True)
class Steps(Recorder):
    """A trace: what goes into and comes out of every client and every local step of the rounds `begin` to `end`.

    `fedloom referee` compares it with the trace of another implementation. A round's file in `recorded/` holds, of client 3,
    what it is sent and sends (`steps/3/in/model/fc.weight`, `steps/3/out/...`), and of its local step 0 the `samples`
    (positions in the training data), the `loss`, and the weights `before` and `after`; `steps/server/end/...` is the
    server's state after the round. Steps are those of `Cohort.fit`.
    """

    begin: Count = 1
    end: Count | None = None

    def hook(self, method: Algorithm, context: RunContext) -> Callable[[int], Any]:
        trace = _Trace(context)
        select, train, finish = method.select, method.train, method.finish

        def selecting(round: Round) -> Selection:
            trace.begin(self.begin <= round.number <= (self.end or round.number))
            return select(round)

        def training(cohort: Cohort, inbox: Message) -> Message:
            return trace.watched(train, cohort, inbox) if trace.open else train(cohort, inbox)

        def finishing(round: Round, exchange: Exchange) -> None:
            finish(round, exchange)
            state = {name: row for name, row in method.full_state().items() if row.dim() == 1 and name[-6:] != ".model"}
            trace.add("server/end", {**state, "model": method.model()} if trace.sizes else {})

        for name, hooked in {"select": selecting, "train": training, "finish": finishing}.items():
            setattr(method, name, hooked)
        return trace.report


class _Trace:
    """The tensors of the round under way, by name, and the samples of its clients."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.begin(False)

    def begin(self, open: bool) -> None:
        self.open, self.sizes = open, dict[int, int]()
        self.tensors: dict[str, Tensor] = {}

    def report(self, number: int) -> Measurement | None:
        """Return the round so far. The server's state after it joins the same tensors."""
        self.open = False  # clients that are evaluated may train as well
        value = {"clients": list(self.sizes), "sizes": list(self.sizes.values())}
        return Measurement(value, self.tensors) if self.sizes else None

    def add(self, name: str, rows: Mapping[str, Tensor]) -> None:
        """Add rows, tensor by tensor where one is of the whole model or of all its parameters."""
        layout = self.context.task.layout
        for key, row in ((key, row) for key, row in rows.items() if not key.startswith("@")):
            copied = row.detach().clone()
            if row.shape in ((layout.size,), (layout.trainable,)):
                for entry in (entry for entry in layout.slices if entry.stop <= len(row)):
                    self.tensors[f"{name}/{key}/{entry.name}"] = copied[entry.slice].view(entry.shape)
            else:
                self.tensors[f"{name}/{key}"] = copied

    def watched(self, train: Callable[[Cohort, Message], Message], cohort: Cohort, inbox: Message) -> Message:
        """Train the clients and add what goes in and comes out."""
        names = [self.context.numbers[client] for client in cohort.clients]
        self.sizes |= dict(zip(names, cohort.sizes.tolist(), strict=True))
        numbers = [count() for _ in names]

        def watch(step: Callable[[Batch], Tensor], rows: Tensor, group: LockStep) -> Callable[[Batch], Tensor]:
            members, batches = group.members(), count()

            def watched(batch: Batch) -> Tensor:
                weights, size = rows.clone(), batch.labels.shape[1]
                start = next(batches) * size
                loss = step(batch)
                for k, member in enumerate(members):
                    index = group.orders[k][start : start + size]
                    real = slice(None) if batch.share is None else batch.share[k] > 0
                    samples = self._samples(cohort.clients[member], index[real], batch.labels[k][real])
                    rows_of_step = {"before": weights[k], "after": rows[k], "loss": loss[k], **samples}
                    self.add(f"{names[member]}/{next(numbers[member])}", rows_of_step)
                return loss

            return watched

        cohort.flat_module.watch = watch
        try:
            reply = train(cohort, inbox)
        finally:
            cohort.flat_module.watch = None
        for k, name in enumerate(names):
            for direction, message in (("in", inbox), ("out", reply)):
                self.add(f"{name}/{direction}", {key: rows[k if len(rows) > 1 else 0] for key, rows in message.items()})
        return reply

    def _samples(self, client: int, index: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the positions of a batch's samples; nothing where the client trains on others than its own."""
        task = self.context.task
        positions = torch.from_numpy(task.partition[client])
        chosen = positions[index.cpu().clamp(max=len(positions) - 1)]
        return {"samples": chosen} if torch.equal(task.train.labels[chosen.to(labels.device)], labels) else {}
