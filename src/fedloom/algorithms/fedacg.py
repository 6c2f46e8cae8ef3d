import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies, server_model
from fedloom.algorithms.fedprox import proximal
from fedloom.common.fields import BelowOne, NonNegative
from fedloom.local.cohort import Cohort


@algorithms.register("fedacg")
class FedACG(Algorithm):
    """FedACG: clients start from w_t + lambda m_t, ahead along the server's momentum m, and
    minimise L_i(w) + beta ||w - (w_t + lambda m_t)||^2.

    Server, uniform over the round: w <- mean_i w_i, m <- lambda m_t + mean_i (w_i - w_t - lambda
    m_t) over the trainable parameters, so that m is the server's last step. Statistics are
    averaged. With lambda 0 this is FedProx with mu = 2 beta and equal weights. Traffic is FedAvg's.
    Source: Kim et al. 2024, algorithm 1.
    Use it when FedAvg is slow and clients cannot store anything.

    Args:
        momentum: lambda (paper: 0.85).
        beta: Strength of the proximal term (authors' code: 0.001).
    """

    momentum: BelowOne = 0.85
    beta: NonNegative = 1e-3

    facts = Facts(anonymous=True)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["momentum"] = torch.zeros_like(plan.initial[: plan.layout.trainable])

    def send(self, round: Round) -> Message:
        return {"model": self._ahead().unsqueeze(0)}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        return replies.aggregate(weighted=False)

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable = slice(self.plan.layout.trainable)
        mean = aggregate.mean["model"]
        self.state["momentum"] = mean[trainable] - self.state["model"][trainable]
        self.state["model"] = mean

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        context = {"server_model": server_model(inbox)[:, : cohort.layout.trainable]}
        term = proximal(2 * self.beta)
        return {"model": cohort.fit(inbox["model"], correction=term, context=context).model}

    def _ahead(self) -> Tensor:
        """Return w_t + lambda m_t, `[P]`."""
        model = self.state["model"].clone()
        model[: self.plan.layout.trainable] += self.momentum * self.state["momentum"]
        return model
