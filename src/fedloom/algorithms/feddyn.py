from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies, server_model
from fedloom.algorithms.statistics import mean_size, relative_sizes
from fedloom.common.fields import NonNegative
from fedloom.local.cohort import Cohort, Context


class Drifting(Algorithm):
    """Server half of FedDyn and FedDC: the mean of the uploads plus the mean drift of all N
    clients.

    `drift [T]` is (1/N) sum over all clients of their h_i, computed only from the uploads.

    Args:
        alpha: Weight of the proximal term (FedDC's code: 0.01, for MNIST 0.1).
    """

    alpha: NonNegative = 0.01

    sends: ClassVar[tuple[str, ...]] = ("model", "mean_size")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["drift"] = torch.zeros_like(plan.initial[: plan.layout.trainable])
        if "mean_size" in self.sends:
            self.state["mean_size"] = mean_size(plan)

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        trainable = slice(self.plan.layout.trainable)
        totals = {name: replies[name] for name in replies.matrices if name != "model"}
        moved = replies["model"][:, trainable] - self.state["model"][trainable]
        return replies.aggregate(
            weighted=False, mean={"model": replies["model"]}, total={**totals, "moved": moved}
        )

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable = slice(self.plan.layout.trainable)
        self.state["drift"] = self.state["drift"] + aggregate.total["moved"] / self.plan.clients
        mean = aggregate.mean["model"]
        mean[trainable] += self.state["drift"]
        self.state["model"] = mean


@algorithms.register("feddyn")
class FedDyn(Drifting):
    """FedDyn: clients minimise L_i(w) + (alpha_i/2) ||w - w_t||^2 + alpha_i <w, h_i>, and remember
    h_i <- h_i + w_i - w_t.

    alpha_i = alpha mean_j n_j / n_i. Server: w <- mean_i w_i + (1/N) sum over all clients of h_i,
    uniform over the round; statistics are averaged.
    Source: Acar et al. 2021, algorithm 1, in the form of FedDC's code.
    Use it when clients hold few classes each, take many local steps and can store a vector as long
    as the model; set a gradient clip.
    """

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        count = cohort.layout.trainable
        sent = server_model(inbox)[:, :count]
        history = cohort.memory.get("feddyn_history", torch.zeros_like(sent))
        context = {
            "strength": self.alpha / relative_sizes(cohort, inbox),
            "centre": sent - history,
        }
        model = cohort.fit(inbox["model"], correction=_pull, context=context).model
        cohort.memory.write("feddyn_history", history + model[:, :count] - sent, cohort.uploads)
        return {"model": model}


def _pull(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
    distance = weights - context["centre"]
    return gradient.addcmul_(distance, context["strength"])
