"""FedAMP: the server sends each client a mean of the models like its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Message, Plan, Replies, algorithms, server_model
from fedloom.algorithms.fedprox import proximal
from fedloom.algorithms.sharing import PartlyShared, length, put, require_everybody, take
from fedloom.config.fields import NonNegative, Positive
from fedloom.flat.population import squared_distances
from fedloom.local.cohort import Cohort, Context, Correction
from fedloom.round import Round


@algorithms.register("fedamp")
@dataclass
class FedAMP(PartlyShared):
    """FedAMP: clients with like models pull each other, through a personalised mean u_i that the server makes for each.

    u_i = sum_j xi_ij w_j with xi_ij = (alpha / sigma) exp(-||w_i - w_j||^2 / sigma) for j != i and xi_ii = 1 - sum of the others;
    where the others exceed 1 they are scaled down to it (`diagnose` tells how many clients that concerns). A client trains its
    own w_i, not u_i, on L_i(w) + (lambda / (2 alpha)) ||w - u_i||^2 and uploads it; w_i is what is scored.
    `norm=plain` takes the norm unsquared, as PFLlib does. Needs all clients in every round.
    The global model is the mean of the clients' models. Source: Huang et al. 2021, algorithm 1; FedALA, appendix G.
    Use it in cross-silo federations whose clients, all present in every round, form groups that nobody knows
    beforehand.
    """

    alpha: Positive = 1000.0
    regularisation: NonNegative = 1.0
    sigma: Positive = 0.1
    norm: Literal["squared", "plain"] = "squared"

    own_model: ClassVar[str] = "fedamp_model"
    averages: ClassVar[bool] = False

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_everybody("fedamp", plan)
        initial = take(self.state.pop("model").unsqueeze(0), self._unit)
        # A view without memory of its own, until the first models arrive.
        self.state = {
            "initial": plan.initial.clone(),
            "models": initial.expand(plan.clients, length(self._unit)),
            "distances": torch.zeros(plan.clients, plan.clients, dtype=torch.float64),
        }

    def send(self, round: Round) -> Message:
        clients = torch.tensor(round.selected)
        return {"model": self._attention()[clients].to(self.state["models"]) @ self.state["models"]}

    def receive(self, round: Round, replies: Replies) -> None:
        models = self.state["models"].clone()
        models[replies.clients] = replies["model"]
        self.state["models"] = models
        self.state["distances"] = squared_distances(models[:, : self.layout.trainable]).double()

    def model(self) -> Tensor:
        return put(self.state["initial"].unsqueeze(0), self._unit, self.state["models"].mean(0, keepdim=True))[0]

    def diagnose(self) -> dict[str, float]:
        return {"fedamp_rescaled": float((self._pulls().sum(1) > 1).double().mean())}

    def _pulls(self) -> Tensor:
        """xi_ij for j != i as the formula gives it, zero on the diagonal, `[N, N]` float64."""
        return ((self.alpha / self.sigma) * torch.exp(-self.state["distances"] / self.sigma)).fill_diagonal_(0)

    def _attention(self) -> Tensor:
        """xi, `[N, N]` float64 with rows that sum to 1."""
        pulls = self._pulls()
        pulls = pulls / pulls.sum(1, keepdim=True).clamp_min(1)
        return pulls + torch.diag(1 - pulls.sum(1))

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        # A wrapper that has made a start of its own means it; else a client goes on from its own model.
        own = start if "server_model" in inbox else cohort.memory.get(self.own_model, start)
        context = {"server_model": self.complete(cohort, server_model(inbox))[:, : cohort.layout.trainable]}
        strength = self.regularisation / self.alpha
        correction = proximal(strength) if self.norm == "squared" else _plain_proximal(strength / 2)
        model = cohort.fit(own, correction=correction, context=context).model
        cohort.memory[self.own_model] = model
        return model


def _plain_proximal(strength: float) -> Correction:
    """Adds the gradient of strength ||w - u||, u the `server_model` of the context: zero where they differ by rounding alone."""

    def correct(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
        away = weights - context["server_model"]
        distance = away.norm(dim=1, keepdim=True)
        rounding = 10 * torch.finfo(away.dtype).eps * weights.norm(dim=1, keepdim=True)
        return gradient.add_(torch.where(distance > rounding, away / distance, 0), alpha=strength)

    return correct
