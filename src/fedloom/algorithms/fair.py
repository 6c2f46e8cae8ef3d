"""q-FedAvg and AFL: clients whose loss is high weigh more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import AggregatedReplies, Algorithm, Message, Plan, Replies, algorithms, server_model
from fedloom.algorithms.sharing import require_everybody
from fedloom.config.fields import NonNegative
from fedloom.local.cohort import Cohort
from fedloom.round import Round


class ReportsLoss(Algorithm):
    """Base of methods whose clients upload the loss of the received model on all of their samples beside their own model."""

    fits_once: ClassVar[bool] = False
    averages: ClassVar[bool] = False

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.layout.size,), "loss": ()}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        loss = cohort.loss(server_model(inbox))
        return {"model": cohort.fit(inbox["model"]).model, "loss": loss}


@algorithms.register("qfedavg")
@dataclass
class QFedAvg(ReportsLoss):
    """q-FedAvg: w <- w_t - sum_i F_i^q g_i / sum_i h_i, with g_i = (w_t - w_i) / eta.

    h_i = q F_i^(q - 1) ||g_i||^2 + F_i^q / eta over the trainable parameters, F_i the loss of w_t on all of client i's
    samples + 1e-10, eta the round's learning rate. Statistics are averaged. q = 0 is FedAvg with equal weights.
    Traffic: one number more up. Source: Li et al. 2020 (q-FFL), algorithm 2.
    Use it when the worst clients count as much as the mean; momentum makes g_i longer, so leave it out or lower q.

    Args:
        q: How much high losses count.
    """

    q: NonNegative = 1.0

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        trainable = slice(self.layout.trainable)
        slopes = (self.state["model"][trainable] - replies["model"][:, trainable]) / round.learning_rate
        loss = replies["loss"] + 1e-10
        power = loss**self.q
        bound = self.q * loss ** (self.q - 1) * slopes.square().sum(1) + power / round.learning_rate
        total = {"slope": (power @ slopes).unsqueeze(0), "bound": bound}
        return replies.aggregate(weighted=False, mean={"model": replies["model"]}, total=total)

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        trainable, model = slice(self.layout.trainable), aggregate.mean["model"].clone()
        model[trainable] = self.state["model"][trainable] - aggregate.total["slope"] / aggregate.total["bound"]
        self.state["model"] = model


@algorithms.register("afl")
@dataclass
class AFL(ReportsLoss):
    """Agnostic federated learning: w <- w_t + sum_i lambda_i (w_i - w_t), lambda <- Proj(lambda + rate F).

    Proj is the projection on the simplex, F_i the loss of w_t on all of client i's samples (0 without a reply); lambda
    starts at 1/N. The global model is the mean of the iterates. With `training.steps = 1` w_t - w_i is a gradient step, as
    in the paper. Needs all clients in every round. Traffic: one number more up.
    Source: Mohri et al. 2019, algorithm 1; local training of several steps as in easyFL.
    Use it with few clients, each of which must be served well.

    Args:
        rate: Learning rate of lambda (easyFL: 0.01); 0 is FedAvg with equal weights.
        mean_of_iterates: Score the mean of all rounds' models; `false` scores the last one.
    """

    rate: NonNegative = 0.01
    mean_of_iterates: bool = True

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_everybody(self, plan)
        shares = torch.full((plan.clients,), 1 / plan.clients, dtype=torch.float64, device=plan.initial.device)
        self.state |= {"shares": shares, "mean": plan.initial.clone()}

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        rows, shares = replies["model"], self.state["shares"]
        clients = replies.clients.to(shares.device)
        step = shares[clients].to(rows) @ (rows - self.state["model"])
        losses = torch.zeros_like(shares).index_copy_(0, clients, replies["loss"].double())
        return replies.aggregate(mean={}, total={"step": step.unsqueeze(0), "losses": losses.unsqueeze(0)})

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        model = self.state["model"] + aggregate.total["step"]
        shares = on_simplex(self.state["shares"] + self.rate * aggregate.total["losses"])
        mean = torch.lerp(self.state["mean"], model, 1 / round.number)
        self.state |= {"model": model, "shares": shares, "mean": mean}

    def model(self) -> Tensor:
        return self.state["mean" if self.mean_of_iterates else "model"]


def on_simplex(values: Tensor) -> Tensor:
    """Return the point of the simplex that is nearest to `values [n]`: max(values - theta, 0), of sum 1."""
    ordered = values.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)
    last = (ordered > excess).sum().unsqueeze(0) - 1
    return (values - excess[last]).clamp_min(0)
