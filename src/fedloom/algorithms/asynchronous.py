"""Asynchronous methods: the server proceeds when some clients have answered, while others still train."""

from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Exchange, Message, Plan, Replies, Selection, Wrapper, algorithms, uniform
from fedloom.algorithms.compression import Compressed
from fedloom.algorithms.fedmr import FedMR, Schedule, blend_at
from fedloom.algorithms.private import AccountedByClient
from fedloom.config.fields import Count, NonNegative, Probability
from fedloom.errors import InvalidValue
from fedloom.flat.population import recombine_, weighted_mean
from fedloom.round import Round


class Asynchronous(Algorithm):
    """Base of methods whose round is one step of the server: it ends when k of the C clients that train have answered.

    C is the number of participants. Clients that have answered are replaced by as many others, drawn uniformly from those
    that do not train. Replies are stored until their time on the clock (`[clock]`), of simultaneous ones those of
    lower-numbered clients first. Without a clock all work takes equally long. Bytes and losses are recorded with the round in
    which the work began. With the clock's `deadline` the server may proceed with fewer than k.

    Over real sites a round's selection is all C clients, in their slots: those that train already are sent nothing. A reply is
    taken, and recorded, when it arrives; a site that fails is asked again, from the model that it was sent.
    """

    asynchronous: ClassVar[bool] = True
    fixed_participants: ClassVar[bool] = True
    foreseeable: ClassVar[bool] = False

    def require_inside(self, outer: Algorithm) -> None:
        """Refuse all outer methods but those that change the client half alone, or code the traffic."""
        changing = ("select", "send", "outgoing", "incoming", "exchange", "receive")
        if not isinstance(outer, Compressed | AccountedByClient) and (
            not isinstance(outer, Wrapper)
            or any(getattr(type(outer), name) is not getattr(Wrapper, name) for name in changing)
        ):
            raise InvalidValue(f"{self} says itself who trains when: nothing that changes rounds goes around it")

    @property
    def step_replies(self) -> int:
        return int(getattr(self, "k", 1))

    def waiting(self, plan: Plan) -> dict[str, Tensor]:
        """Return the slots before round 1: clients (-1: none), the version that each trains from, and when it answers."""
        if self.step_replies > plan.participants:
            most = f"the {plan.participants} clients that train at a time"
            raise InvalidValue(f"k must be at most {most}, not {self.step_replies}")
        nobody, until = torch.full((plan.participants,), -1), torch.zeros(plan.participants, dtype=torch.float64)
        return {"client": nobody, "since": torch.zeros_like(nobody), "until": until, "now": until.new_zeros(1)}

    def free(self) -> Tensor:
        """Return the slots without a client."""
        return (self.state["client"] < 0).nonzero()[:, 0]

    def store(self, slots: Tensor, **rows: Tensor) -> None:
        """Replace rows of the state, by name, at these slots."""
        for name, values in rows.items():
            stored = self.state[name]
            self.state[name] = stored.index_copy(0, slots.to(stored.device), values)

    def select(self, round: Round) -> Selection:
        busy = set(self.state["client"].tolist())
        free = self.free()
        drawn = [client for client in uniform(round) if client not in busy][: len(free)]
        if self.plan.remote:
            drawn = self.state["client"].index_copy(0, free, torch.tensor(drawn)).tolist()
        return Selection(tuple(drawn))

    def enter(self, version: int, exchange: Exchange) -> None:
        """Over real sites, store who was sent this `version` of the model, and what."""
        free = self.free()
        if self.plan.remote and len(free):
            clients = torch.tensor(exchange.selection.clients)[free]
            never = torch.full((len(free),), torch.inf, dtype=torch.float64)
            self.store(free, client=clients, since=torch.full_like(free, version), until=never)
            if "sent" in self.state:
                self.store(free, sent=exchange.sent["model"][free.to(exchange.sent["model"].device)])

    def begin(self, version: int, replies: Replies) -> Tensor:
        """Store whose replies, to this `version` of the model, are under way. Return their slots."""
        if self.plan.remote:
            assert replies.exchange is not None, "the federation gives it"
            self.enter(version, replies.exchange)
            self.store(replies.slots, until=self.state["now"].expand(len(replies)))
            return replies.slots
        slots = self.free()[replies.slots]
        until = self.state["now"].expand(len(replies)) + 1 if replies.finish is None else replies.finish
        self.store(slots, client=replies.clients, since=torch.full_like(slots, version), until=until)
        return slots

    def arrived(self, round: Round) -> Tensor:
        """Return the slots, ascending, of the first k replies, empty them, and advance the clock to the last of these."""
        client, until = self.state["client"], self.state["until"]
        busy = ((client >= 0) & until.isfinite()).nonzero()[:, 0]
        finish, clients = until[busy].tolist(), client[busy].tolist()
        taken, end = round.on_time(finish, clients, self.step_replies, float(self.state["now"]))
        slots = busy[taken]
        self.state["now"] = torch.tensor([end], dtype=torch.float64)
        self.state["client"] = self.state["client"].index_fill(0, slots, -1)
        return slots

    def account(self) -> dict[str, float]:
        return {"simulated_seconds": float(self.state["now"])} | super().account()


class Buffered(Asynchronous, Wrapper):
    """Base of asynchronous methods of one model: the inner method averages k replies at a time.

    Stale replies are discounted by s(tau) = (1 + tau)^-`staleness`, with tau the versions by which the server's model is ahead.
    """

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        opening = plan.opening()
        for inner in reversed([*self.method.nested()]):
            sent, expected = inner.send(opening).keys(), dict(inner.expects(opening))
            fits = sent == {"model"} and expected == {"model": (plan.layout.size,)}
            selects = type(inner).select not in (Algorithm.select, Wrapper.select)
            if not fits or selects or inner.one_model_each or not inner.averages:
                reason = "does more than average whole models, which stale replies do not fit"
                raise InvalidValue(f"{self}: {inner} {reason}")
        rows = plan.initial.new_zeros(plan.participants, plan.layout.size)
        weights, version = torch.zeros(plan.participants, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        stored = {"replies": rows, "sent": rows.clone(), "weights": weights, "version": version}
        self.state = self.waiting(plan) | stored

    def outgoing(self, round: Round, message: Message) -> Message:
        if not self.plan.remote:
            return message
        busy = (self.state["client"] >= 0).unsqueeze(1).to(message["model"].device)
        return {**message, "model": torch.where(busy, self.state["sent"], message["model"])}

    def receive(self, round: Round, replies: Replies) -> None:
        rows, weights = replies["model"], replies.weights.to(torch.int64)
        slots = self.begin(int(self.state["version"]), replies)
        self.store(slots, replies=rows, sent=replies.sent("model").expand(len(rows), -1), weights=weights)

    def finish(self, round: Round, exchange: Exchange) -> None:
        self.enter(int(self.state["version"]), exchange)
        clients, slots = self.state["client"], self.arrived(round)
        if len(slots):
            index, clients = slots.to(self.state["sent"].device), clients[slots]
            model, rows = exchange.within().sent["model"], self.state["replies"][index]
            stale = (self.state["version"] - self.state["since"][slots]).to(rows)
            self.state["version"] = self.state["version"] + 1
            rows = self.moved(model, self.state["sent"][index], rows, stale[:, None])
            inner = exchange.within().among(tuple(clients.tolist()))
            inner_slots, weights = torch.arange(len(slots)), self.state["weights"][slots]
            self.method.receive(inner.round, Replies({"model": rows}, clients, inner_slots, weights, inner))
        super().finish(round, exchange)

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        """Return models in place of replies `rows [k, P]` to `sent`, `stale [k, 1]` versions behind `model [1, P]`."""
        raise NotImplementedError


@algorithms.register("fedbuff")
class FedBuff(Buffered):
    """FedBuff: buffered asynchronous aggregation. C clients train at a time, and the server steps whenever `k` have answered.

    With u_i = w_i - w_(t - tau) the update of a client that was sent a model tau versions ago, the inner method receives

        w_t + u_i (1 + tau_i)^-`staleness`

    for the models of these k clients: `fedbuff(fedavg, k=10)` steps by their mean, `fedbuff(fedavg(weighted=false))` is the
    paper's. Batch-norm statistics move from those of w_t towards the client's. k = C is the inner method, bit for bit. Time is
    the clock's, `simulated_seconds`; see `Asynchronous` for rounds.
    Source: Nguyen et al. 2022, "Federated learning with buffered asynchronous aggregation", algorithm 1.
    Use it when a few slow clients hold up every round.

    Args:
        k: Replies in a step (paper: 10).
        staleness: Exponent of the discount (paper: 0.5).
    """

    k: Count = 10
    staleness: NonNegative = 0.5

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        weight = (1 + stale) ** -self.staleness
        trainable = self.layout.trainable
        origin = torch.cat([sent[:, :trainable], model[:, trainable:].expand(len(rows), -1)], 1)
        return torch.where(stale == 0, rows, model + weight * (rows - origin))


@algorithms.register("fedasync")
class FedAsync(Buffered):
    """FedAsync: every reply changes the model at once, the less the staler it is.

    For the model w_i of a client that was sent one tau versions ago:

        w <- (1 - a) w + a w_i,   a = alpha (1 + tau)^-`staleness`

    C clients train at a time (see `Asynchronous`). The client half is that of the inner method: `fedasync(fedprox)` keeps the
    paper's proximal term. Time is the clock's, `simulated_seconds`.
    Source: Xie et al. 2019, "Asynchronous federated optimization", algorithm 1, polynomial weighting.
    Use it when single clients are to count at once; `fedbuff` has less random steps.

    Args:
        alpha: Weight of a fresh reply (paper: 0.6).
        staleness: Exponent of the discount (paper: 0.5).
    """

    alpha: Probability = 0.6
    staleness: NonNegative = 0.5

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        return model + self.alpha * (1 + stale) ** -self.staleness * (rows - model)


@algorithms.register("fedmr_async")
class FedMRAsync(Asynchronous, FedMR):
    """Semi-asynchronous FedMR: the models of the first `k` clients that answer are recombined and sent on; the others travel on.

    The pool has C models, one at each client that trains. When k are back, every unit of layers is shuffled over these k alone
    (as in `fedmr`), and each goes to a new client. The global model is the mean of the pool, in which a model that is under way
    counts as it was sent. No reply is stale: a model returns to the pool that it left. k = C is FedMR, bit for bit.
    Source: ours; FedMR is Hu et al., KDD 2024, algorithm 1.
    Use it where `fedmr` would, and a few slow clients hold up every round.

    Args:
        k: Models that are recombined at a time.
    """

    k: Count = 10
    blend: Schedule = 0.0  # without `auto`, which looks at all models of a round together

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state |= self.waiting(plan)
        self.state["replies"] = self.state["pool"].clone()

    def send(self, round: Round) -> Message:
        pool = self.state["pool"]
        return {"model": pool if self.plan.remote else pool[self.free()[: len(round.selected)].to(pool.device)]}

    def receive(self, round: Round, replies: Replies) -> None:
        self.store(self.begin(round.number, replies), replies=replies["model"])

    def finish(self, round: Round, exchange: Exchange) -> None:
        self.enter(round.number, exchange)
        slots = self.arrived(round)
        if len(slots):
            rows = self.state["replies"][slots.to(self.state["pool"].device)]
            rows = recombine_(rows, self.layout.units(self.unit, self.fraction), round.stream("recombine"))
            if (share := blend_at(self.blend, round.number)) > 0:
                rows.lerp_(weighted_mean(rows), share)
            self.store(slots, pool=rows)
        super().finish(round, exchange)
