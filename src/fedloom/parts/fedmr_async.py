from dataclasses import field

import torch

from fedloom.algorithm import Algorithm
from fedloom.algorithm.method import Method, algorithms
from fedloom.algorithm.records import Exchange, Message, Plan, Replies
from fedloom.algorithms.fedmr import FedMR, Schedule, blend_at
from fedloom.common.fields import Count, Share
from fedloom.common.round import Round
from fedloom.flat.layout import UnitKind
from fedloom.flat.population import recombine_, weighted_mean
from fedloom.parts.arrivals import Arrivals
from fedloom.parts.hooks import Inner


class PoolOfArrivals(FedMR):
    """FedMR on the server for only the models that have arrived, in their slots of the pool."""

    def send(self, round: Round) -> Message:
        return {"model": self.state["pool"]}

    def receive(self, round: Round, replies: Replies) -> None:
        rows = recombine_(replies["model"], self.units(), round.stream("recombine"))
        assert not isinstance(self.blend, str)
        if (share := blend_at(self.blend, round.number)) > 0:
            rows.lerp_(weighted_mean(rows), share)
        pool = self.state["pool"]
        self.state["pool"] = pool.index_copy(0, replies.slots.to(pool.device), rows)


@algorithms.register("fedmr_async")
class FedMRAsync(Arrivals):
    """Semi-asynchronous FedMR: the models of the first `k` replies are recombined and go to new
    clients.

    The pool has C models, one at each training client. When k have returned, every unit of layers
    is shuffled over only these k (as in `fedmr`), and each goes to a new client. The global model
    is the mean of the pool, with models that are still at a client as they were before training. No
    reply is stale, since a model returns to the same pool. k = C is FedMR, bit for bit.
    Source: ours; FedMR is Hu et al., KDD 2024, algorithm 1.
    Use it where you would use `fedmr`, and a few slow clients delay every round.

    Args:
        k: Number of models that are recombined in a step.
        unit: As in `fedmr`.
        fraction: As in `fedmr`.
        blend: As in `fedmr`, without `auto`, which needs all models of a round at once.
        local: As in `fedmr`.
    """

    method: Method = field(init=False)
    unit: UnitKind = "layer"
    fraction: Share = 1.0
    blend: Schedule = 0.0
    k: Count = 10
    local: Algorithm | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.method = PoolOfArrivals(self.unit, self.fraction, self.blend, local=self.local)
        super().__post_init__()

    def _inner(self) -> list[Method]:
        return [self.method]

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state["replies"] = plan.initial.expand(plan.participants, -1).clone()

    def message(self, round: Round, message: Message) -> Message:
        pool = message["model"]
        if self.plan.remote:
            return message
        return {**message, "model": pool[self.free()[: len(round.selected)].to(pool.device)]}

    def close(self, exchange: Exchange, replies: Replies | None) -> Replies | None:
        number = exchange.round.number
        if replies is not None:
            self.store(self.begin(number, replies), replies=replies["model"])
        self.enter(number, exchange)
        clients = self.state["client"]
        slots = self.arrived(exchange.round)
        if not len(slots):
            return None
        rows = self.state["replies"][slots.to(self.state["replies"].device)]
        weights = torch.ones_like(slots)
        return Replies({"model": rows}, clients[slots], slots, weights, exchange)
