from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Message, Plan, Replies, Selection
from fedloom.common.round import Round
from fedloom.flat.layout import Unit
from fedloom.parts.hooks import Inner, Part
from fedloom.secure.exchange import Rehearsal, Rules, rehearse, stream_choices
from fedloom.secure.layers import layer_sizes


@algorithms.register("secure")
class Secure(Part):
    """Secure recombination for FedMR: clients exchange layers before training and upload, hidden
    from the server.

    In each of `repeats` a client sends n layers, n uniform in [`low`, `high`], to random other
    clients of the round, and for each received layer returns a random one of the same index. Every
    layer stays in the round exactly once, so sums and distances over the models are exact, and the
    server can recombine again. Layers are FedMR's `unit`. Clients without a reply take no part in
    the exchange before the upload. The layers that a lost client received are lost with it, and its
    slot contains the model that was sent. `peer_bytes` counts the traffic between clients in the
    last round (equation 26, without envelopes; over real sites all bytes).

    Averages must not depend on the client of a model: FedMR, Indep, FedMut and
    `fedavg(weighted=false)` are possible, also in `stages`, `umf`, `ala` and
    `clustered(by='size')`. Sample counts, losses and integer buffers still travel with the names of
    clients.
    Source: Hu et al., arXiv 2208.07677, appendix B, algorithm 2; the additional exchange before
    training is this project's advice.
    Use it when the server must not see any client's model; a simulation shows the cost.

    Args:
        repeats: Number of consecutive exchanges.
        low: Smallest number of layers that a client sends.
        high: Largest number of layers; none is a quarter of all layers in the first repeat and all
            later.
        when: `before_upload`, `before_train` or `both`. With only `before_upload` the server can
            recognise layers of the models that it sent.
    """

    repeats: int = 2
    low: int = 1
    high: int | None = None
    when: Literal["both", "before_upload", "before_train"] = "both"

    requires: ClassVar[tuple[str, ...]] = ("anonymous", "whole models", "only the model")
    facts = Facts(anonymous=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules()

    def hooks(self) -> frozenset[str]:
        return super().hooks() - (set() if self.exchanges("before_train") else {"move"})

    def rules(self) -> Rules:
        """Return the rules of the exchange."""
        return Rules(self.repeats, self.low, self.high)

    def units(self) -> list[Unit]:
        """Return the slices of a row that move together."""
        return self._units

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self._units = inner.algorithm.units()
        self._count(0)
        self.rules().bounds(len(self._units))

    def move(self, round: Round, message: Message) -> Message:
        rows = message.get("model")
        count = len(round.selected)
        # An exchange needs two or more clients with different rows. Over real sites, the clients
        # exchange layers themselves.
        if self.plan.remote or rows is None or not len(rows) >= count > 1:
            return message
        # An additional last row is for idle clients, which take no part.
        rehearsal = self.rehearse(round, round.selected, "before_train")
        self.carried(self._bytes(rehearsal))
        return {**message, "model": self._moved(rows, rehearsal, torch.arange(count))}

    def exchange(self, round: Round, replies: Replies) -> Replies:
        if not self.exchanges("before_upload") or self.plan.remote:
            return replies
        rehearsal = self.rehearse(round, replies.clients.tolist(), "before_upload")
        model = self._moved(replies.matrices["model"], rehearsal, replies.slots)
        self.carried(self._bytes(rehearsal))
        return replies.with_matrices({**replies.matrices, "model": model})

    def account(self, round: Round, selection: Selection) -> None:
        self._count(self.state["carried"])

    def carried(self, count: int) -> None:
        """Record that clients exchanged layers in this round, with `count` bytes of traffic."""
        self.state["carried"] = self.state["carried"] + count

    def _count(self, total: Tensor | int) -> None:
        """Set the bytes of the last round, and start the count of the next."""
        nothing = torch.zeros(1, dtype=torch.int64)
        self.state = {"carried": nothing, "peer_bytes": nothing + total}

    def _moved(self, rows: Tensor, rehearsal: Rehearsal, slots: Tensor) -> Tensor:
        moved = self.plan.empty_rows(len(rows)).copy_(rows)
        exchange_(moved, rows, self.units(), rehearsal.sources, slots)
        return moved

    def diagnose(self) -> dict[str, float]:
        return {"peer_bytes": float(self.state["peer_bytes"])}

    def rehearse(self, round: Round, clients: Sequence[int], when: str) -> Rehearsal:
        """Return an exchange of this round. It is a pure function of the arguments.

        Args:
            round: The round.
            clients: The clients that take part.
            when: `before_train` or `before_upload`.

        Returns:
            The source of each layer, and the number of messages.
        """
        return rehearse(
            clients, len(self.units()), self.rules(), stream_choices(round.stream), when
        )

    def exchanges(self, when: str) -> bool:
        """Return True if clients exchange layers at `before_train` or `before_upload`."""
        return self.when in ("both", when)

    def _bytes(self, rehearsal: Rehearsal) -> int:
        return rehearsal.bytes(layer_sizes(self.units(), self.plan.initial))


def exchange_(
    moved: Tensor,
    rows: Tensor,
    units: Sequence[Unit],
    sources: Sequence[Sequence[int]],
    slots: Tensor,
) -> None:
    """Move units between rows: set `moved[slots[k], unit u]` to `rows[slots[sources[u][k]], unit
    u]`.

    Args:
        moved: Rows after the exchange, `[S, P]`. Modified in place; other rows stay unchanged.
        rows: Rows before it, `[S, P]`.
        units: Column slices that move together.
        sources: For each unit, the index in `slots` of the source of each client.
        slots: Slots of the clients, `[k]`.
    """
    slots = slots.to(rows.device)
    for unit, source in zip(units, sources, strict=True):
        origins = slots[torch.tensor(source, dtype=torch.int64, device=rows.device)]
        for piece in unit:
            moved[slots, piece] = rows[origins, piece]
