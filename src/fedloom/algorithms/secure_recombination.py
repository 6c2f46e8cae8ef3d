from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Exchange, Message, Plan, Replies, Round, Wrapper, algorithms
from fedloom.algorithms.fedmr import FedMR, Indep
from fedloom.errors import InvalidValue
from fedloom.flat.layout import Unit
from fedloom.secure.exchange import Rehearsal, Rules, rehearse, stream_choices
from fedloom.secure.layers import layer_sizes


@algorithms.register("secure")
class Secure(Wrapper):
    """Secure recombination over FedMR: clients exchange layers before training and before upload, unseen by the server.

    In each of `repeats` a client sends n layers, n uniform in [`low`, `high`], to other clients of the round at random, and for
    each layer that it received returns a random one of the same index. Every layer stays in the round exactly once, so sums
    and distances over the models are exact, and the server may recombine again. Layers are FedMR's `unit`. Clients that do
    not reply take no part in the exchange before upload; a lost client takes the layers that it received along, and its slot
    keeps the model that was sent. `peer_bytes` counts the clients' traffic among each other in the last round (equation 26,
    without envelopes; over real sites all that was carried).

    Averages must not depend on whose a model is: FedMR, Indep, FedMut and `fedavg(weighted=false)` qualify, in `stages`, `umf`,
    `ala` and `clustered(by='size')` too. Sample counts, losses and integer buffers still travel with names on them.
    Source: Hu et al., arXiv 2208.07677, appendix B, algorithm 2; exchanging before training as well is this project's advice.
    Use it when the server must not see any client's model; a simulation shows what that costs.

    Args:
        repeats: Exchanges in a row.
        low: Fewest layers that a client sends.
        high: Most layers; none is a quarter of them in the first repeat and all of them later.
        when: `before_upload` (alone, the server recognises layers of the models that it sent), `before_train` or `both`.
    """

    repeats: int = 2
    low: int = 1
    high: int | None = None
    when: Literal["both", "before_upload", "before_train"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules()
        _require_anonymous(self.method)
        _exchanged_unit(self.method)

    def rules(self) -> Rules:
        """Return the rules of the exchange."""
        return Rules(self.repeats, self.low, self.high)

    def units(self) -> list[Unit]:
        """Return the slices of a row that move together."""
        return self.layout.units(*_exchanged_unit(self.method))

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self._count(0)
        self.rules().bounds(len(self.units()))
        expected = dict(self.method.expects(plan.opening()))
        if expected != {"model": (plan.layout.size,)}:
            raise InvalidValue(f"secure: clients of {self.method} do not return one whole model and nothing else")

    def outgoing(self, round: Round, message: Message) -> Message:
        if not self._rehearses(round, message):
            return message
        # A row beyond those of the selected clients is for idle ones, which take no part.
        rehearsal = self.rehearse(round, round.selected, "before_train")
        return {**message, "model": self._moved(message["model"], rehearsal, torch.arange(len(round.selected)))}

    def receive(self, round: Round, replies: Replies) -> None:
        if self.exchanges("before_upload") and not self.plan.remote:
            rehearsal = self.rehearse(round, replies.clients.tolist(), "before_upload")
            model = self._moved(replies.matrices["model"], rehearsal, replies.slots)
            replies = replace(replies, matrices={**replies.matrices, "model": model})
            self.carried(self._bytes(rehearsal))
        super().receive(round, replies)

    def finish(self, round: Round, exchange: Exchange) -> None:
        if self._rehearses(round, exchange.within().sent):
            self.carried(self._bytes(self.rehearse(round, round.selected, "before_train")))
        self._count(self.state["carried"])
        super().finish(round, exchange)

    def carried(self, count: int) -> None:
        """Take note that clients exchanged layers in this round, and `count` bytes were carried between them."""
        self.state["carried"] = self.state["carried"] + count

    def _count(self, total: Tensor | int) -> None:
        """Set the bytes of the last round, and begin to count those of the next one."""
        nothing = torch.zeros(1, dtype=torch.int64)
        self.state = {"carried": nothing, "peer_bytes": nothing + total}

    def _moved(self, rows: Tensor, rehearsal: Rehearsal, slots: Tensor) -> Tensor:
        moved = self.plan.empty_rows(len(rows)).copy_(rows)
        exchange_(moved, rows, self.units(), rehearsal.sources, slots)
        return moved

    def _rehearses(self, round: Round, message: Message) -> bool:
        """Return True if this simulation moves the layers of what is sent: models of their own, for two clients or more."""
        count = len(round.selected)
        return not self.plan.remote and self.exchanges("before_train") and len(message["model"]) >= count > 1

    def diagnose(self) -> dict[str, float]:
        return {**self.method.diagnose(), "peer_bytes": float(self.state["peer_bytes"])}

    def rehearse(self, round: Round, clients: Sequence[int], when: str) -> Rehearsal:
        """Return the exchange `when` of this round among these clients; a pure function of its arguments."""
        return rehearse(clients, len(self.units()), self.rules(), stream_choices(round.stream), when)

    def exchanges(self, when: str) -> bool:
        """Return True if clients exchange at this point: `before_train` or `before_upload`."""
        return self.when in ("both", when)

    def _bytes(self, rehearsal: Rehearsal) -> int:
        return rehearsal.bytes(layer_sizes(self.units(), self.plan.initial))


def exchange_(
    moved: Tensor, rows: Tensor, units: Sequence[Unit], sources: Sequence[Sequence[int]], slots: Tensor
) -> None:
    """Set `moved[slots[k], unit u]` to `rows[slots[sources[u][k]], unit u]` in place; other rows stay."""
    slots = slots.to(rows.device)
    for unit, source in zip(units, sources, strict=True):
        origins = slots[torch.tensor(source, dtype=torch.int64, device=rows.device)]
        for piece in unit:
            moved[slots, piece] = rows[origins, piece]


def _require_anonymous(method: Algorithm) -> None:
    """Raise `InvalidValue`, naming the method to blame, unless all uploads of a round are treated alike."""
    if method.anonymous_replies:
        return
    for inner in [] if isinstance(method, Indep) else method.inner():  # Indep's `local` receives no uploads
        _require_anonymous(inner)
    hint = ": give it weighted=false" if getattr(method, "weighted", False) else ""
    raise InvalidValue(f"secure: {method} needs to know whose an upload is, which the exchange hides{hint}")


def _exchanged_unit(method: Algorithm) -> tuple[Literal["layer", "tensor", "segment"], float]:
    """Return FedMR's unit and fraction, or layers by default. Raise `InvalidValue` if stages differ in them."""
    methods = [inner for inner in method.nested() if isinstance(inner, FedMR)]
    units = {(inner.unit, inner.fraction if inner.unit == "segment" else 1.0) for inner in methods}
    if len(units) > 1:
        raise InvalidValue(f"secure: {method} moves different units; make each of its stages secure by itself")
    return units.pop() if units else ("layer", 1.0)
