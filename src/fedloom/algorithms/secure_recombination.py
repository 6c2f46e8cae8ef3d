"""Secure model recombination around FedMR and its like, in a simulation: layers change hands as peers would exchange them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Plan, Replies, Wrapper, algorithms, describe
from fedloom.algorithms.fedmr import FedMR, Indep
from fedloom.errors import InvalidValue
from fedloom.flat.layout import Unit
from fedloom.round import Round
from fedloom.secure.draws import stream_choices
from fedloom.secure.exchange import LayerExchange, Rehearsal, Rules, rehearse
from fedloom.secure.layers import layer_sizes


@algorithms.register("secure")
@dataclass
class Secure(Wrapper, LayerExchange):
    """Secure recombination over FedMR: clients exchange layers before training and before upload, unseen by the server.

    In each of `repeats` a client sends n layers, n uniform in [`low`, `high`], to other clients of the round at random, and for
    each layer that it received returns a random one of the same index. Every layer stays in the round exactly once, so sums
    and distances over the models are exact, and the server may recombine once more. Without `high`, n goes up to a quarter of
    the layers in the first repeat, and to all of them later. `when` is `before_upload`, `before_train` or `both`: a server
    that knows which model it sent to whom can recognise layers that were exchanged before upload alone.

    What moves together is what FedMR's `unit` says. Choices come from streams of (round, client, stage), those of
    `fedloom.secure.Peer` when it rehearses, so that both move the same layers. Clients that do not reply take no part in the
    exchange before upload; one that received a model and is lost takes along the layers it held, and its slot keeps what the
    server dispatched. `peer_bytes` is what the clients of the last round sent each other (equation 26, without envelopes; over
    real sites, whose layers nobody can count, all that was carried).

    Averages must not depend on whose a model is: FedMR, Indep, FedMut and `fedavg(weighted=false)` qualify, in `stages`, `umf`,
    `ala` and `clustered(by='size')` too. Sample counts, losses and integer buffers still travel with names on them.
    Source: Hu et al., arXiv 2208.07677, appendix B, algorithm 2; exchanging before training as well is this project's advice.
    Use it when the server must not see any client's model; a simulation shows what that costs.
    """

    repeats: int = 2
    low: int = 1
    high: int | None = None
    when: Literal["both", "before_upload", "before_train"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules()
        _require_anonymous(self.method)
        _moving_together(self.method)

    def rules(self) -> Rules:
        return Rules(self.repeats, self.low, self.high)

    def units(self) -> list[Unit]:
        return self.layout.units(*_moving_together(self.method))

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        nothing = torch.zeros(1, dtype=torch.int64)
        self.state = {"train_bytes": nothing, "upload_bytes": nothing, "peer_bytes": nothing}
        self.rules().bounds(len(self.units()))
        expected = dict(self.method.expects(plan.opening()))
        if expected != {"model": (plan.layout.size,)}:
            raise InvalidValue(
                f"secure: clients of {describe(self.method)} do not return one whole model and nothing else"
            )

    def send(self, round: Round) -> Message:
        message = self.method.send(round)
        rows, count = message["model"], len(round.selected)
        self.state["train_bytes"] = torch.zeros(1, dtype=torch.int64)
        if self.plan.remote or not self.exchanges("before_train") or len(rows) < count or count < 2:
            return message
        # A row beyond the selected ones is for clients that train without uploading: they take no part.
        rehearsal = self.rehearse(round, round.selected, "before_train")
        self.state["train_bytes"] = torch.tensor([rehearsal.bytes(self._sizes())])
        moved = self.plan.empty_rows(len(rows)).copy_(rows)
        exchange_(moved[:count], rows, self.units(), rehearsal.sources)
        return {**message, "model": moved}

    def receive(self, round: Round, replies: Replies) -> None:
        if self.exchanges("before_upload") and not self.plan.remote:
            rehearsal = self.rehearse(round, replies.clients.tolist(), "before_upload")
            whole = self.plan.empty_rows(len(round.selected))
            moved = whole[: len(replies)].copy_(replies["model"])
            exchange_(moved, replies["model"], self.units(), rehearsal.sources)
            replies = replace(replies, tensors={**replies.tensors, "model": moved}, matrices={"model": whole})
            self.state["upload_bytes"] = torch.tensor([rehearsal.bytes(self._sizes())])
        self.method.receive(round, replies)

    def finish(self, round: Round) -> None:
        # Without any reply there was no exchange before upload, and `receive` was not called.
        nothing = torch.zeros(1, dtype=torch.int64)
        total = self.state["train_bytes"] + self.state["upload_bytes"]
        self.state = {"train_bytes": nothing, "upload_bytes": nothing, "peer_bytes": total}
        super().finish(round)

    def diagnose(self) -> dict[str, float]:
        return {**self.method.diagnose(), "peer_bytes": float(self.state["peer_bytes"])}

    def rehearse(self, round: Round, clients: Sequence[int], when: str) -> Rehearsal:
        """What the exchange `when` of this round does between these clients; a pure function of its arguments."""
        return rehearse(clients, len(self.units()), self.rules(), stream_choices(round.stream), when)

    def exchanges(self, when: str) -> bool:
        return self.when in ("both", when)

    def carried(self, when: str, count: int) -> None:
        name = "train_bytes" if when == "before_train" else "upload_bytes"
        self.state = {**self.state, name: self.state[name] + count}

    def _sizes(self) -> list[int]:
        return layer_sizes(self.units(), self.plan.initial)


def exchange_(moved: Tensor, rows: Tensor, units: Sequence[Unit], sources: Sequence[Sequence[int]]) -> None:
    """Set `moved[k, unit u]` to `rows[sources[u][k], unit u]`; slices outside all units stay."""
    for unit, source in zip(units, sources, strict=True):
        index = torch.tensor(source, device=rows.device)
        for part in unit:
            torch.index_select(rows[:, part], 0, index, out=moved[:, part])


def _require_anonymous(method: Algorithm) -> None:
    """Raise `InvalidValue`, naming the method that is to blame, unless all uploads of a round are treated alike."""
    if method.anonymous_replies:
        return
    for inner in [] if isinstance(method, Indep) else method.inner():  # whose `local` trains, and receives no uploads
        _require_anonymous(inner)
    hint = ": give it weighted=false" if getattr(method, "weighted", False) else ""
    raise InvalidValue(f"secure: {describe(method)} needs to know whose an upload is, which the exchange hides{hint}")


def _moving_together(method: Algorithm) -> tuple[Literal["layer", "tensor", "segment"], float]:
    """FedMR's unit and fraction, or layers where nothing else is asked for. Raises `InvalidValue` when they differ."""
    found = {
        (inner.unit, inner.fraction if inner.unit == "segment" else 1.0)
        for inner in method.nested()
        if isinstance(inner, FedMR)
    }
    if len(found) > 1:
        raise InvalidValue(
            f"secure: {describe(method)} moves different units; make each of its stages secure by itself"
        )
    return found.pop() if found else ("layer", 1.0)
