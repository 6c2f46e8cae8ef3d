"""Base of asynchronous parts around algorithms that average. They adjust stale replies to the
present model.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.records import Exchange, Message, Plan, Replies
from fedloom.common.round import Round
from fedloom.parts.arrivals import Arrivals
from fedloom.parts.hooks import Inner


class StaleReplies(Arrivals):
    """Passes the first k replies to the algorithm inside, as replies to the present model.

    `moved` returns the models that replace them. tau is the number of versions by which the present
    model is ahead.
    """

    requires: ClassVar[tuple[str, ...]] = ("only averages",)

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        rows = plan.initial.new_zeros(plan.participants, plan.layout.size)
        self.state |= {
            "replies": rows,
            "sent": rows.clone(),
            "weights": torch.zeros(plan.participants, dtype=torch.int64),
            "version": torch.zeros(1, dtype=torch.int64),
        }

    def message(self, round: Round, message: Message) -> Message:
        if not self.plan.remote:
            return message
        busy = (self.state["client"] >= 0).unsqueeze(1).to(message["model"].device)
        model = torch.where(busy, self.state["sent"], message["model"])
        return {**message, "model": model}

    def close(self, exchange: Exchange, replies: Replies | None) -> Replies | None:
        version = int(self.state["version"])
        if replies is not None:
            sent = exchange.moved["model"]
            if len(sent) > 1:
                sent = sent[replies.slots.to(sent.device)]
            rows = replies["model"]
            weights = replies.weights.to(torch.int64)
            slots = self.begin(version, replies)
            self.store(slots, replies=rows, sent=sent.expand(len(rows), -1), weights=weights)
        self.enter(version, exchange)
        clients = self.state["client"]
        slots = self.arrived(exchange.round)
        if not len(slots):
            return None
        return self._arrivals(exchange, clients[slots], slots)

    def _arrivals(self, exchange: Exchange, clients: Tensor, slots: Tensor) -> Replies:
        index = slots.to(self.state["sent"].device)
        model = exchange.sent["model"]
        rows = self.state["replies"][index]
        stale = (self.state["version"] - self.state["since"][slots]).to(rows)
        self.state["version"] = self.state["version"] + 1
        rows = self.moved(model, self.state["sent"][index], rows, stale[:, None])
        among = exchange.among(tuple(clients.tolist()))
        weights = self.state["weights"][slots]
        return Replies({"model": rows}, clients, torch.arange(len(slots)), weights, among)

    @abstractmethod
    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        """Return models that replace stale replies.

        Args:
            model: The present model, `[1, P]`.
            sent: The models that the clients received, `[k, P]`.
            rows: Their replies, `[k, P]`.
            stale: Number of versions by which the present model is ahead, `[k, 1]`.

        Returns:
            Models, `[k, P]`.
        """
