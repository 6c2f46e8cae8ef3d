from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, server_model
from fedloom.algorithms.feddyn import Drifting
from fedloom.algorithms.statistics import mean_gradient, relative_sizes, require_sgd
from fedloom.local.cohort import Cohort, Context, Trained


@algorithms.register("feddc")
class FedDC(Drifting):
    """FedDC: clients minimise L_i(w) + (alpha_i/2) ||w - (w_t - h_i)||^2 + <w, g/a_i - g_i>, with
    drift h_i and update g_i.

    a_i = n_i / mean_j n_j, alpha_i = alpha / a_i. After tau steps from w_t to w_i, with d_i = w_i -
    w_t: h_i <- h_i + d_i; u_i = g_i - g/a_i - d_i / (tau eta); upload w_i and a_i (u_i - g_i); g_i
    <- u_i. Server: g <- g + (1/N) sum_i a_i (u_i - g_i); w <- mean_i w_i + (1/N) sum over all
    clients of h_i, uniform over the round; statistics are averaged. h_i, g_i and g are `[T]`.
    Source: Gao et al. 2022, algorithm 1.
    Use it when clients hold few classes each and can store two vectors as long as the model.
    """

    needs = (require_sgd,)
    sends: ClassVar[tuple[str, ...]] = ("model", "mean_size", "update")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["update"] = torch.zeros_like(self.state["drift"])

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "update": (self.plan.layout.trainable,)}

    def update(self, round: Round, aggregate: Aggregate) -> None:
        super().update(round, aggregate)
        change = aggregate.total["update"] / self.plan.clients
        self.state["update"] = self.state["update"] + change

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        count = cohort.layout.trainable
        sent = server_model(inbox)[:, :count]
        start = inbox["model"]
        drift = cohort.memory.get("feddc_drift", torch.zeros_like(sent))
        update = cohort.memory.get("feddc_update", torch.zeros_like(sent))
        size = relative_sizes(cohort, inbox)
        offset = inbox["update"] / size - update
        context = {
            "strength": self.alpha / size,
            "centre": sent - drift,
            "offset": offset,
        }
        trained = cohort.fit(start, correction=_decoupled, context=context)
        moved = trained.model[:, :count]
        steps, rate = self.divisors(cohort, inbox, trained)
        new_update = mean_gradient(start[:, :count], moved, steps, rate).sub_(offset)
        has_trained = (trained.steps > 0).to(new_update.device).unsqueeze(1)
        new_update = torch.where(has_trained, new_update, update)
        cohort.memory.write("feddc_drift", drift + moved - sent, cohort.uploads)
        cohort.memory.write("feddc_update", new_update, cohort.uploads)
        change = (new_update - update).mul_(size)
        return {"model": trained.model, "update": change}

    def divisors(self, cohort: Cohort, inbox: Message, trained: Trained) -> tuple[Tensor, float]:
        """Return the divisors of the clients' displacements.

        Args:
            cohort: The clients.
            inbox: The server's message.
            trained: Result of local training.

        Returns:
            tau, `[k]`, and eta.
        """
        return trained.steps, cohort.round.learning_rate


def _decoupled(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
    distance = weights - context["centre"]
    gradient.addcmul_(distance, context["strength"])
    return gradient.add_(context["offset"])
