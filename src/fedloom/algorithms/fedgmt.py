from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.algorithm import Algorithm, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies, server_model
from fedloom.algorithms.statistics import require_classes
from fedloom.common.fields import NonNegative, Positive, Probability
from fedloom.flat.module import Batch, Net
from fedloom.local.cohort import Cohort, Context


@algorithms.register("fedgmt")
class FedGMT(Algorithm):
    """FedGMT: clients learn from their labels and from the moving average e of the server's models,
    with a dual h_i.

    Clients minimise L_i(w) + gamma tau^2 KL(softmax(z_e / tau) || softmax(z / tau)) + <w, h_i> /
    beta, with z and z_e the outputs of w and e, and e in evaluation mode; then h_i <- h_i + w_i -
    w_t. Server: w <- sum_i p_i w_i + (1/N) sum over all clients of h_i, then e <- alpha e + (1 -
    alpha) w. e starts at the initial model, h_i at 0. The model to evaluate is w. Traffic: two
    models down, one up.
    Source: Li et al. 2025, algorithm 1, in the form of the authors' code, where e is in training
    mode with its initial statistics.
    Use it when models overfit their clients: it is cheaper than two passes for each step.

    Args:
        alpha: Decay of the moving average (authors' code: 0.95).
        gamma: Weight of the divergence (authors' code: 1).
        temperature: tau (authors' code: 3).
        beta: Inverse weight of the dual (authors' code: 10).
    """

    alpha: Probability = 0.95
    gamma: NonNegative = 1.0
    temperature: Positive = 3.0
    beta: Positive = 10.0

    needs = (require_classes,)
    sends: ClassVar[tuple[str, ...]] = ("model", "teacher")
    facts = Facts()

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["teacher"] = plan.initial.clone()
        self.state["drift"] = torch.zeros_like(plan.initial[: plan.layout.trainable])

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        trainable = slice(self.plan.layout.trainable)
        moved = replies["model"][:, trainable] - self.state["model"][trainable]
        return replies.aggregate(mean={"model": replies["model"]}, total={"moved": moved})

    def update(self, round: Round, aggregate: Aggregate) -> None:
        self.state["drift"] = self.state["drift"] + aggregate.total["moved"] / self.plan.clients
        model = aggregate.mean["model"]
        model[: self.plan.layout.trainable] += self.state["drift"]
        self.state["teacher"] = torch.lerp(model, self.state["teacher"], self.alpha)
        self.state["model"] = model

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        count = cohort.layout.trainable
        sent = server_model(inbox)[:, :count]
        history = cohort.memory.get("fedgmt_history", torch.zeros_like(sent))
        trained = cohort.fit(
            inbox["model"],
            loss_fn=self._loss,
            correction=self._correct,
            context={"teacher": inbox["teacher"], "history": history},
        )
        moved = trained.model[:, :count] - sent
        cohort.memory.write("fedgmt_history", history + moved, cohort.uploads)
        return {"model": trained.model}

    def _loss(self, net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
        outputs = net(batch.inputs)
        with torch.no_grad():
            teacher = net.at(context["teacher"])(batch.inputs)
            taught = F.log_softmax(teacher / self.temperature, dim=1)
        student = F.log_softmax(outputs / self.temperature, dim=1)
        divergence = (taught.exp() * (taught - student)).sum(1).mean()
        loss = net.objective.loss(outputs, batch.labels)
        return loss + self.gamma * self.temperature**2 * divergence

    def _correct(self, weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
        return gradient.add_(context["history"], alpha=1 / self.beta)
