"""Asynchronous methods: the server goes on when some clients have answered, while the others still train."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import (
    Algorithm,
    Message,
    Plan,
    Replies,
    Selection,
    Wrapper,
    algorithms,
    describe,
    require_one_model,
    uniform,
)
from fedloom.algorithms.compression import Compressed
from fedloom.algorithms.fedmr import FedMR, blend_at
from fedloom.algorithms.private import AccountedByClient
from fedloom.config.fields import Count, NonNegative, Probability
from fedloom.errors import InvalidValue
from fedloom.flat.population import recombine_
from fedloom.round import Round


class Asynchronous(Algorithm):
    """The base of methods whose round is one step of the server: it ends when k of the C clients that train have answered.

    C is the number of participants. Then those that have answered are replaced by as many others, drawn uniformly from the
    clients that do not train. A client's work is computed when it is sent the model, with that model, and its reply is kept
    until the clock (`[clock]`) says that it is there; of replies at the same time those of lower-numbered clients come first.
    Without a clock all work takes equally long. Bytes and losses are recorded with the round in which the work began. Rounds
    and times depend on nothing else, so a run that was killed goes on bit for bit. With the clock's `deadline` the server goes
    on with fewer than k.
    """

    asynchronous: ClassVar[bool] = True
    fixed_participants: ClassVar[bool] = True

    def require_inside(self, outer: Algorithm) -> None:
        """Only what changes the clients' half, or codes what travels, goes around."""
        if not isinstance(outer, Compressed | AccountedByClient) and (
            not isinstance(outer, Wrapper)
            or any(getattr(type(outer), name) is not getattr(Wrapper, name) for name in ("select", "send", "receive"))
        ):
            raise InvalidValue(
                f"{describe(self)} says itself who trains when: nothing that changes rounds goes around it"
            )

    @property
    def foreseeable(self) -> bool:
        return False

    def waiting(self, plan: Plan, k: int) -> dict[str, Tensor]:
        """The state before round 1, of C places: their clients (-1: nobody), since which round and until when they train."""
        if k > plan.participants:
            raise InvalidValue(f"k must be at most the {plan.participants} clients that train at a time, not {k}")
        if plan.remote:
            raise InvalidValue(f"{describe(self)} needs the simulated clock: over real sites every round waits for all")
        nobody = torch.full((plan.participants,), -1)
        return {
            "client": nobody,
            "since": torch.zeros_like(nobody),
            "until": torch.zeros(plan.participants, dtype=torch.float64),
            "now": torch.zeros(1, dtype=torch.float64),
        }

    def free(self) -> Tensor:
        """The places of nobody."""
        return (self.state["client"] < 0).nonzero()[:, 0]

    def select(self, round: Round) -> Selection:
        busy = set(self.state["client"].tolist())
        drawn = [client for client in uniform(round) if client not in busy]
        return Selection(tuple(drawn[: len(self.free())]))

    def begin(self, round: Round, replies: Replies) -> Tensor:
        """Note whose replies are under way; returns their places."""
        places = self.free()[replies.slots]
        until = torch.ones(len(replies), dtype=torch.float64) + self.state["now"]
        since = torch.full_like(places, round.number)
        self.state["client"] = self.state["client"].index_copy(0, places, replies.clients)
        self.state["since"] = self.state["since"].index_copy(0, places, since)
        self.state["until"] = self.state["until"].index_copy(
            0, places, until if replies.finish is None else replies.finish
        )
        return places

    def arrived(self, round: Round, k: int) -> Tensor:
        """The places, in ascending order, of the first k replies, which are free from now on; the clock moves to the last."""
        client, until, now = (self.state[name].tolist() for name in ("client", "until", "now"))
        order = sorted((until[place], client[place], place) for place in range(len(client)) if client[place] >= 0)
        taken = [entry for entry in order[:k] if entry[0] <= round.closes]
        waits = round.closes < float("inf") and len(taken) < min(k, len(order))
        last = round.closes if waits else max([now[0], *(entry[0] for entry in taken)])
        places = torch.tensor(sorted(place for _, _, place in taken), dtype=torch.int64)
        self.state["now"] = torch.tensor([last], dtype=torch.float64)
        return places

    def clear(self, places: Tensor) -> None:
        """Nobody trains at these places any more."""
        self.state["client"] = self.state["client"].index_fill(0, places, -1)

    def account(self) -> dict[str, float]:
        return {"simulated_seconds": float(self.state["now"])} | super().account()


@dataclass
class Buffered(Asynchronous, Wrapper):
    """The base of asynchronous methods of one model, whose replies `method` averages: it is given `k` of them, the stale ones
    discounted by s(tau) = (1 + tau)^-`staleness`, where tau is how many versions the server's model is ahead."""

    def setup(self, plan: Plan) -> None:
        Wrapper.setup(self, plan)
        opening = plan.opening()
        for part in self.method.nested():
            require_one_model(describe(self), part, opening)
            more = sorted((part.expects(opening).keys() | part.send(opening).keys()) - {"model"})
            own = type(part).select not in (Algorithm.select, Wrapper.select)
            if more or own or not part.averages or part.expects(opening)["model"] != (plan.layout.size,):
                reason = f"exchanges {more[0]!r} beside the model" if more else "does more than average whole models"
                raise InvalidValue(f"{describe(self)}: {describe(part)} {reason}, which stale replies do not fit")
        rows = torch.zeros(plan.participants, plan.layout.size, dtype=plan.initial.dtype, device=plan.initial.device)
        weights = torch.zeros(plan.participants, dtype=torch.int64)
        self.state = {**self.waiting(plan, self.goal), "replies": rows, "sent": rows.clone(), "weights": weights}

    @property
    def goal(self) -> int:
        """k, how many replies make a step."""
        return 1

    def receive(self, round: Round, replies: Replies) -> None:
        places, sent = self.begin(round, replies), self.method.send(round)["model"]
        device = self.state["sent"].device
        where, rows = places.to(device), replies["model"]
        self.state["replies"] = self.state["replies"].index_copy(0, where, rows)
        self.state["sent"] = self.state["sent"].index_copy(0, where, sent.expand(len(rows), -1))
        self.state["weights"] = self.state["weights"].index_copy(0, places, replies.weights.to(torch.int64))

    def finish(self, round: Round) -> None:
        places = self.arrived(round, self.goal)
        if len(places):
            where = places.to(self.state["sent"].device)
            model, rows = self.method.send(round)["model"], self.state["replies"][where]
            stale = (round.number - self.state["since"][places]).to(rows)
            rows = self.moved(model, self.state["sent"][where], rows, stale[:, None])
            clients = self.state["client"][places]
            round = replace(round, selected=tuple(clients.tolist()))
            slots = torch.arange(len(places))
            self.method.receive(round, Replies({"model": rows}, clients, slots, self.state["weights"][places]))
            self.clear(places)
        super().finish(round)

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        """What stands for the replies `rows [k, P]` to the models `sent`, `stale [k, 1]` versions ago, beside `model [1, P]`."""
        raise NotImplementedError


@algorithms.register("fedbuff")
@dataclass
class FedBuff(Buffered):
    """FedBuff: buffered asynchronous aggregation. C clients train at a time, and the server steps whenever `k` have answered.

    With u_i = w_i - w_(t - tau) the update of a client that was sent a model tau versions ago, the inner method receives

        w_t + u_i (1 + tau_i)^-`staleness`

    for the models of these k clients: `fedbuff(fedavg, k=10)` steps by their mean. Statistics of batch norm are moved from those
    of w_t towards the client's. k = C is the inner method itself, bit for bit. Time is the clock's, `simulated_seconds`; see
    `Asynchronous` for what a round is, and `fedavg(weighted=false)` for the paper's mean.
    Source: Nguyen et al. 2022, "Federated learning with buffered asynchronous aggregation", algorithm 1.
    Use it when a few slow clients hold up every round.
    """

    k: Count = 10
    staleness: NonNegative = 0.5

    @property
    def goal(self) -> int:
        return self.k

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        weight = (1 + stale) ** -self.staleness
        trainable = self.layout.trainable
        origin = torch.cat([sent[:, :trainable], model[:, trainable:].expand(len(rows), -1)], 1)
        return torch.where(stale == 0, rows, model + weight * (rows - origin))


@algorithms.register("fedasync")
@dataclass
class FedAsync(Buffered):
    """FedAsync: every reply changes the model at once, the less the staler it is.

    For the model w_i of a client that was sent one tau versions ago:

        w <- (1 - a) w + a w_i,   a = alpha (1 + tau)^-`staleness`

    C clients train at a time (see `Asynchronous`). The client half is that of the inner method: `fedasync(fedprox)` keeps the
    paper's proximal term. Time is the clock's, `simulated_seconds`.
    Source: Xie et al. 2019, "Asynchronous federated optimization", algorithm 1, polynomial weighting.
    Use it when single clients are to count at once; `fedbuff` moves less at random.
    """

    alpha: Probability = 0.6
    staleness: NonNegative = 0.5

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        return model + self.alpha * (1 + stale) ** -self.staleness * (rows - model)


@algorithms.register("fedmr_async")
@dataclass
class FedMRAsync(Asynchronous, FedMR):
    """Semi-asynchronous FedMR: the models of the first `k` clients that answer are recombined and sent on; the others travel on.

    The pool has C models, one at each client that trains. When k are back, every unit of layers is shuffled over these k alone
    (as in `fedmr`), and each goes to a new client. The global model is the mean of the pool, in which a model that is under way
    counts as it was sent. No reply is stale: a model comes back to the pool that it left. k = C is FedMR, bit for bit.
    Source: ours; FedMR is Hu et al., KDD 2024, algorithm 1.
    Use it where `fedmr` would, and a few slow clients hold up every round.
    """

    k: Count = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blend == "auto":
            raise InvalidValue("fedmr_async: blend=auto looks at all models of a round together: give a share")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state |= self.waiting(plan, self.k)
        self.state["replies"] = self.state["pool"].clone()

    def send(self, round: Round) -> Message:
        return {"model": self.state["pool"][self.free()[: len(round.selected)].to(self.state["pool"].device)]}

    def receive(self, round: Round, replies: Replies) -> None:
        places = self.begin(round, replies).to(self.state["pool"].device)
        self.state["replies"] = self.state["replies"].index_copy(0, places, replies["model"])

    def finish(self, round: Round) -> None:
        arrived = self.arrived(round, self.k)
        places = arrived.to(self.state["pool"].device)
        if len(places):
            units = self.layout.units(self.unit, self.fraction)
            rows = recombine_(self.state["replies"][places], units, round.stream("recombine"))
            if (share := blend_at(self.blend, round.number)) > 0:
                rows.lerp_(rows.mean(0), share)
            self.state["pool"] = self.state["pool"].index_copy(0, places, rows)
            self.clear(arrived)
        super().finish(round)
