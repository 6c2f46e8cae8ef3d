"""Base of asynchronous parts: the server makes a step when some clients have replied, while others
still train.
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import Facts
from fedloom.algorithm.records import Exchange, Plan, Replies, Selection, uniform
from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.parts.hooks import Inner, Part


class Arrivals(Part):
    """A round is one step of the server. It ends when k of the C training clients have replied.

    C is the number of participants. The server replaces clients that have replied by the same
    number of others, drawn uniformly from the clients that do not train. A reply is stored until
    its time on the clock (`[clock]`); of simultaneous replies, the one of the client with the lower
    number comes first. Without a clock all work takes equally long. Bytes and losses are recorded
    with the round in which the work began. With the clock's `deadline` a step can have fewer than k
    replies.

    Over real sites a round's selection contains all C clients in their slots, but clients that
    already train receive no message. A reply is processed and recorded when it arrives. The server
    repeats the request to a failed site, with the same model.
    """

    k = 1
    """Number of replies in a step."""

    once: ClassVar[bool] = True
    facts = Facts(fixed_participants=True, independent=False, foreseeable=False)

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        if self.k > plan.participants:
            limit = f"the {plan.participants} clients that train at the same time"
            raise InvalidValue(f"k must be at most {limit}, not {self.k}")
        none = torch.full((plan.participants,), -1)
        until = torch.zeros(plan.participants, dtype=torch.float64)
        self.state = {
            "client": none,  # by slot; -1: no client
            "since": torch.zeros_like(none),  # version of the model from which it trains
            "until": until,  # time of its reply
            "now": until.new_zeros(1),
        }

    def free(self) -> Tensor:
        """Return the slots without a client."""
        return (self.state["client"] < 0).nonzero()[:, 0]

    def store(self, slots: Tensor, **rows: Tensor) -> None:
        """Replace rows of the state, by name, in these slots.

        Args:
            slots: Numbers of the slots, `[r]`.
            rows: New rows by name, `[r, ...]`.
        """
        for name, values in rows.items():
            stored = self.state[name]
            self.state[name] = stored.index_copy(0, slots.to(stored.device), values)

    def select(self, round: Round, inner: Inner) -> Selection:
        busy = set(self.state["client"].tolist())
        free = self.free()
        drawn = [client for client in uniform(round) if client not in busy][: len(free)]
        if self.plan.remote:
            drawn = self.state["client"].index_copy(0, free, torch.tensor(drawn)).tolist()
        return Selection(tuple(drawn))

    def enter(self, version: int, exchange: Exchange) -> None:
        """Over real sites, store which clients received this `version` of the model, and the
        messages.

        Args:
            version: Version of the model that the clients received.
            exchange: Record of the round, with the selection and the messages.
        """
        free = self.free()
        if self.plan.remote and len(free):
            clients = torch.tensor(exchange.selection.clients)[free]
            never = torch.full((len(free),), torch.inf, dtype=torch.float64)
            self.store(free, client=clients, since=torch.full_like(free, version), until=never)
            if "sent" in self.state:
                rows = exchange.moved["model"]
                self.store(free, sent=rows[free.to(rows.device)])

    def begin(self, version: int, replies: Replies) -> Tensor:
        """Store the replies to this `version` of the model that are under way.

        Args:
            version: Version of the model.
            replies: The replies, in a simulation before their time of arrival.

        Returns:
            Their slots, `[r]`.
        """
        if self.plan.remote:
            assert replies.exchange is not None, "the federation sets it"
            self.enter(version, replies.exchange)
            self.store(replies.slots, until=self.state["now"].expand(len(replies)))
            return replies.slots
        slots = self.free()[replies.slots]
        until = (
            self.state["now"].expand(len(replies)) + 1 if replies.finish is None else replies.finish
        )
        self.store(
            slots, client=replies.clients, since=torch.full_like(slots, version), until=until
        )
        return slots

    def arrived(self, round: Round) -> Tensor:
        """Return the slots of the first k replies in ascending order, empty them, and advance the
        clock to the last of these replies.
        """
        client = self.state["client"]
        until = self.state["until"]
        busy = ((client >= 0) & until.isfinite()).nonzero()[:, 0]
        finish = until[busy].tolist()
        clients = client[busy].tolist()
        taken, end = round.on_time(finish, clients, self.k, float(self.state["now"]))
        slots = busy[taken]
        self.state["now"] = torch.tensor([end], dtype=torch.float64)
        self.state["client"] = self.state["client"].index_fill(0, slots, -1)
        return slots

    def report(self) -> dict[str, float]:
        return {"simulated_seconds": float(self.state["now"])}
