from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Facts, Round, algorithms
from fedloom.algorithm.records import Message, Plan, Replies, server_model, start_is_changed
from fedloom.algorithms.every_model import EveryModel
from fedloom.algorithms.fedprox import proximal
from fedloom.common.fields import NonNegative, Positive
from fedloom.flat.population import squared_distances
from fedloom.local.cohort import Cohort, Context, Correction


@algorithms.register("fedamp")
class FedAMP(EveryModel):
    """FedAMP: clients with similar models attract each other. The server computes a personalised
    mean u_i for each client.

    u_i = sum_j xi_ij w_j, xi_ij = (alpha / sigma) exp(-||w_i - w_j||^2 / sigma) for j != i and
    xi_ii = 1 - sum_{j != i} xi_ij. Where the sum exceeds 1, its xi_ij are divided by it (`diagnose`
    reports the share of such clients). A client trains its own w_i, not u_i, on L_i(w) + (lambda /
    (2 alpha)) ||w - u_i||^2, uploads it and is scored with it. The global model is the mean of the
    clients' models. Needs all clients in every round.
    Source: Huang et al. 2021, algorithm 1; FedALA, appendix G.
    Use it in cross-silo federations with all clients in every round that form unknown groups.

    Args:
        alpha: Strength of the attraction (FedALA: 1000).
        regularisation: lambda (FedALA: 1).
        sigma: Scale of squared distances between models (FedALA: 0.1).
        norm: `squared`, or `plain` for the norm without the square in a client's loss, as in
            PFLlib.
    """

    alpha: Positive = 1000.0
    regularisation: NonNegative = 1.0
    sigma: Positive = 0.1
    norm: Literal["squared", "plain"] = "squared"

    own_model: ClassVar[str] = "fedamp_model"
    base_facts = Facts(averages=False, one_model_each=True)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["distances"] = torch.zeros(plan.clients, plan.clients, dtype=torch.float64)

    def send(self, round: Round) -> Message:
        pulls = self._pulls()
        pulls = pulls / pulls.sum(1, keepdim=True).clamp_min(1)
        attention = pulls + torch.diag(1 - pulls.sum(1))  # xi, rows of sum 1
        return {
            "model": attention[list(round.selected)].to(self.state["models"]) @ self.state["models"]
        }

    def receive(self, round: Round, replies: Replies) -> None:
        super().receive(round, replies)
        self.state["distances"] = squared_distances(
            self.state["models"][:, : self.plan.layout.trainable]
        ).double()

    def diagnose(self) -> dict[str, float]:
        return {"fedamp_rescaled": float((self._pulls().sum(1) > 1).double().mean())}

    def _pulls(self) -> Tensor:
        """xi_ij for j != i before scaling, zero on the diagonal, `[N, N]` float64."""
        return (
            (self.alpha / self.sigma) * torch.exp(-self.state["distances"] / self.sigma)
        ).fill_diagonal_(0)

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        # If a part changed the start, train from it; otherwise continue from the client's model.
        model = start if start_is_changed(inbox) else cohort.memory.get(self.own_model, start)
        context = {
            "server_model": self.complete(cohort, server_model(inbox))[:, : cohort.layout.trainable]
        }
        strength = self.regularisation / self.alpha
        correction = proximal(strength) if self.norm == "squared" else _plain_proximal(strength / 2)
        model = cohort.fit(model, correction=correction, context=context).model
        cohort.memory[self.own_model] = model
        return model


def _plain_proximal(strength: float) -> Correction:
    """Return a correction by the gradient of strength ||w - u||, with u the `server_model`.

    It is 0 where w and u differ only by rounding.
    """

    def correct(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
        difference = weights - context["server_model"]
        distance = difference.norm(dim=1, keepdim=True)
        rounding = 10 * torch.finfo(difference.dtype).eps * weights.norm(dim=1, keepdim=True)
        return gradient.add_(
            torch.where(distance > rounding, difference / distance, 0), alpha=strength
        )

    return correct
