from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies
from fedloom.algorithms.server_step import PlainMeanStep
from fedloom.algorithms.sharpness import sharp_gradient
from fedloom.algorithms.statistics import mean_gradient, momentum_gain, require_sgd
from fedloom.common.fields import NonNegative, Positive, Share
from fedloom.local.cohort import Cohort, Context
from fedloom.local.optimizer import GradientFn


@algorithms.register("fedcm")
class FedCM(PlainMeanStep):
    """FedCM: local steps follow alpha g + (1 - alpha) m, where m is the clients' mean gradient of
    the last round.

    After tau_i steps of length eta, m = mean_i (w_t - w_i) / (tau_i eta), `[T]`, 0 in the first
    round; eta / (1 - momentum) for eta. Server, uniform over the round: w <- w_t + eta_g mean_i
    (w_i - w_t). Statistics are averaged. With alpha 1 this is FedAvg with equal weights. Traffic:
    two vectors down, one up.
    Source: Xu et al. 2021, algorithm 1; the authors' code is not public.
    Use it when few of many clients take part in a round and cannot store anything.

    Args:
        alpha: Weight of the client's gradient (paper: 0.1).
        server_learning_rate: eta_g (paper: 1).
    """

    alpha: Share = 0.1
    server_learning_rate: Positive = 1.0

    needs = (require_sgd,)
    sends: ClassVar[tuple[str, ...]] = ("model", "momentum")
    facts = Facts(averages=False, anonymous=True)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["momentum"] = torch.zeros_like(plan.initial[: plan.layout.trainable])

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "steps": (1,)}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        trainable = slice(self.plan.layout.trainable)
        rate = round.learning_rate * momentum_gain(self.plan.training)
        start, end = self.state["model"][trainable], replies["model"][:, trainable]
        gradient = mean_gradient(start, end, replies["steps"].squeeze(1), rate)
        return replies.aggregate(
            weighted=False, mean={"model": replies["model"], "gradient": gradient}
        )

    def step_length(self, aggregate: Aggregate) -> float:
        return self.server_learning_rate

    def update(self, round: Round, aggregate: Aggregate) -> None:
        super().update(round, aggregate)
        if round.learning_rate > 0:
            self.state["momentum"] = aggregate.mean["gradient"]

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        def correct(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
            return torch.lerp(context["momentum"], gradient, self.alpha)

        trained = cohort.fit(
            inbox["model"],
            gradient_fn=self.gradient_fn(cohort),
            correction=correct,
            context={"momentum": inbox["momentum"]},
            pad=True,
        )
        steps = trained.steps.to(trained.model).unsqueeze(1)
        return {"model": trained.model, "steps": steps}

    def gradient_fn(self, cohort: Cohort) -> GradientFn | None:
        """Return the function that computes g; None for the gradient of the loss."""
        return None


@algorithms.register("mofedsam")
class MoFedSAM(FedCM):
    """MoFedSAM: FedCM with the gradient at w + rho g / ||g||, where g is the batch's gradient at w.

    With rho 0 this is FedCM; with alpha 1 it is FedSAM with equal weights. Each step costs two
    passes.
    Source: Qu et al. 2022, algorithm 2; the authors' code is not public.
    Use it like `fedcm` where models overfit their clients.

    Args:
        rho: Size of the perturbation (paper: 0.1).
    """

    rho: NonNegative = 0.1

    facts = Facts(averages=False, anonymous=True, fits_once=False)

    def gradient_fn(self, cohort: Cohort) -> GradientFn:
        return sharp_gradient(cohort, self.rho)
