from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies, server_model
from fedloom.algorithms.sharpness import normalised, sharp_gradient
from fedloom.common.fields import NonNegative, Positive
from fedloom.local.cohort import Cohort, Context


@algorithms.register("fedgloss")
class FedGloSS(Algorithm):
    """FedGloSS: the server sends the perturbed model v = w_t + rho G / ||G||, where G is the last
    round's mean of w_t - w_i, and clients train from v with a dual.

    Local steps follow g' - s_i + (w - v) / beta, with g' SAM's gradient for `client_rho`; then s_i
    <- s_i - (w_i - v) / beta. Server, with D = sum_i p_i (w_i - v) by samples and the plain mean d:
    s <- s - d / (beta N), w <- w_t + eta_g D - beta s. G is 0 in the first round; all vectors are
    `[T]`, and statistics are averaged. With rho 0 and `dual` off this is FedSAM. Traffic is
    FedAvg's.
    Source: Caldarola et al. 2025, algorithm 1, in the form of the authors' code. That code renews v
    and s_i in every epoch, and a ramp of `rho` there ends at `client_rho`; here, both are constant.
    Use it when FedSAM's models are flat for their clients but not for the average.

    Args:
        rho: Size of the server's perturbation (CIFAR-10: 0.15).
        client_rho: Size of the clients' perturbation (CIFAR-10: 0.15).
        beta: Inverse weight of the proximal term (CIFAR-10: 10).
        server_learning_rate: eta_g (authors' code: 1).
        dual: Use the proximal term and the duals s_i and s.
    """

    rho: NonNegative = 0.15
    client_rho: NonNegative = 0.15
    beta: Positive = 10.0
    server_learning_rate: Positive = 1.0
    dual: bool = True

    sends: ClassVar[tuple[str, ...]] = ("model",)
    facts = Facts(fits_once=False)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        zeros = torch.zeros_like(plan.initial[: plan.layout.trainable])
        self.state |= {"gradient": zeros, "dual": zeros.clone()}

    def send(self, round: Round) -> Message:
        return {"model": self._perturbed().unsqueeze(0)}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        trainable = slice(self.plan.layout.trainable)
        moved = replies["model"][:, trainable] - replies.sent("model")[:, trainable]
        return replies.aggregate(mean={"model": replies["model"]}, total={"moved": moved})

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable = slice(self.plan.layout.trainable)
        following = aggregate.mean["model"]
        update = following[trainable] - self._perturbed()[trainable]
        step = self.server_learning_rate * update
        if self.dual:
            mean = aggregate.total["moved"] / aggregate.count
            self.state["dual"] = self.state["dual"] - mean / (self.beta * self.plan.clients)
            step = step - self.beta * self.state["dual"]
        following[trainable] = self.state["model"][trainable] + step
        self.state |= {"model": following, "gradient": -update}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        gradient_fn = sharp_gradient(cohort, self.client_rho)
        if not self.dual:
            return {"model": cohort.fit(inbox["model"], gradient_fn=gradient_fn, pad=True).model}
        sent = server_model(inbox)[:, : cohort.layout.trainable]
        dual = cohort.memory.get("fedgloss_dual", torch.zeros_like(sent))
        context = {"sent": sent, "dual": dual}
        model = cohort.fit(
            inbox["model"],
            gradient_fn=gradient_fn,
            correction=self._correct,
            context=context,
            pad=True,
        ).model
        moved = model[:, : cohort.layout.trainable] - sent
        cohort.memory.write("fedgloss_dual", dual - moved / self.beta, cohort.uploads)
        return {"model": model}

    def _correct(self, weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
        pull = (weights - context["sent"]) / self.beta
        return gradient.sub_(context["dual"]).add_(pull)

    def _perturbed(self) -> Tensor:
        """Return v, `[P]`."""
        model = self.state["model"].clone()
        model[: self.plan.layout.trainable] += normalised(self.state["gradient"], self.rho)
        return model
