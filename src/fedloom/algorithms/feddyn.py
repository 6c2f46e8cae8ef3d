"""FedDyn: a regulariser with a memory, which aligns the clients' optima with the server's."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.algorithm import AggregatedReplies, Algorithm, Message, Plan, Replies, algorithms, server_model
from fedloom.algorithms.statistics import mean_size, relative_sizes
from fedloom.config.fields import NonNegative
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort, Context
from fedloom.round import Round


@dataclass
class Drifting(Algorithm):
    """Server half of FedDyn and FedDC: the mean of the uploads plus the mean drift of all N clients.

    `drift [T]` is (1/N) sum over all clients of their h_i, computed from the uploads alone.

    Args:
        alpha: Weight of the proximal term (FedDC's code: 0.01, for MNIST 0.1).
        evaluate: Global model: w_bar + drift, which is sent (`cloud`); w_bar (`selected`); or the mean of every client's
            last upload (`all`; the server then holds N models).
    """

    alpha: NonNegative = 0.01
    evaluate: Literal["cloud", "selected", "all"] = "cloud"

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["drift"] = torch.zeros_like(plan.initial[: plan.layout.trainable])
        self.state["mean_size"] = mean_size(plan)
        if self.evaluate == "selected":
            self.state["selected"] = plan.initial.clone()
        if self.evaluate == "all":
            self.state["uploads"] = plan.initial.repeat(plan.clients, 1)

    def send(self, round: Round) -> Message:
        return {name: self.state[name].unsqueeze(0) for name in ("model", "mean_size")}

    def receive(self, round: Round, replies: Replies) -> None:
        super().receive(round, replies)
        if self.evaluate == "all":
            clients = replies.clients.to(replies["model"].device)
            self.state["uploads"] = self.state["uploads"].index_copy(0, clients, replies["model"])

    @property
    def folds(self) -> bool:
        return self.evaluate != "all" and type(self).receive is Drifting.receive

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        trainable = slice(self.layout.trainable)
        totals = {name: rows for name, rows in replies.tensors.items() if name != "model"}
        moved = replies["model"][:, trainable] - self.state["model"][trainable]
        return replies.aggregate(weighted=False, mean={"model": replies["model"]}, total={**totals, "moved": moved})

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        trainable = slice(self.layout.trainable)
        self.state["drift"] = self.state["drift"] + aggregate.total["moved"] / self.plan.clients
        mean = aggregate.mean["model"]
        cloud = mean.clone()
        cloud[trainable] += self.state["drift"]
        self.state["model"] = cloud
        if self.evaluate == "selected":
            self.state["selected"] = mean

    def model(self) -> Tensor:
        if self.evaluate == "all":
            return weighted_mean(self.state["uploads"])
        return self.state["selected" if self.evaluate == "selected" else "model"]


@algorithms.register("feddyn")
@dataclass
class FedDyn(Drifting):
    """FedDyn: clients minimise L_i(w) + (alpha_i/2) ||w - w_t||^2 + alpha_i <w, h_i>, and remember h_i <- h_i + w_i - w_t.

    alpha_i = alpha mean_j n_j / n_i. Server: w <- mean_i w_i + (1/N) sum over all clients of h_i, uniform over the round;
    statistics are averaged.
    Source: Acar et al. 2021, algorithm 1, in the form of FedDC's code.
    Use it when clients hold few classes each, take many local steps and can remember a vector; set a gradient clip.
    """

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        count = cohort.layout.trainable
        sent = server_model(inbox)[:, :count]
        history = cohort.memory.get("feddyn_history", torch.zeros_like(sent))
        context = {"strength": self.alpha / relative_sizes(cohort, inbox), "centre": sent - history}
        model = cohort.fit(inbox["model"], correction=_pull, context=context).model
        cohort.memory.write("feddyn_history", history + model[:, :count] - sent, cohort.uploads)
        return {"model": model}


def _pull(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
    return gradient.addcmul_(weights - context["centre"], context["strength"])
