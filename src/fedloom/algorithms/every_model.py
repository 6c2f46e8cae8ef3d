"""FedAMP and APPLE: clients get mixtures of all clients' models, of which the server keeps the last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import SERVER_MODEL, Message, Plan, Replies, algorithms, server_model
from fedloom.algorithms.proximal import proximal
from fedloom.algorithms.sharing import PartlyShared, require_everybody, take
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.config.fields import NonNegative, Positive, Probability
from fedloom.flat.layout import Layout
from fedloom.flat.module import Batch
from fedloom.flat.population import squared_distances, weighted_mean
from fedloom.local.cohort import Cohort, Context, Correction
from fedloom.round import Round


@dataclass
class EveryModel(PartlyShared):
    """Base of methods whose server keeps the last model of each client, `models [N, m]`; all take part in every round."""

    averages: ClassVar[bool] = False

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_everybody(self, plan)
        initial = take(plan.initial.unsqueeze(0), self._unit)
        # A view that takes no memory until the first models arrive.
        self.state = {"initial": plan.initial.clone(), "models": initial.expand(plan.clients, -1)}

    def receive(self, round: Round, replies: Replies) -> None:
        models = self.state["models"].clone()
        models[replies.clients] = replies["model"]
        self.state["models"] = models

    def model(self) -> Tensor:
        return self.whole(self.state["initial"], self.state["models"].mean(0))


@algorithms.register("fedamp")
@dataclass
class FedAMP(EveryModel):
    """FedAMP: clients with similar models attract each other through a personalised mean u_i that the server makes for each.

    u_i = sum_j xi_ij w_j, xi_ij = (alpha / sigma) exp(-||w_i - w_j||^2 / sigma) for j != i and xi_ii = 1 - sum_{j != i} xi_ij;
    where that sum exceeds 1, its xi_ij are scaled down to it (`diagnose` reports for how many clients). A client trains its
    own w_i, not u_i, on L_i(w) + (lambda / (2 alpha)) ||w - u_i||^2, uploads it and is scored with it. The global model is
    the mean of the clients' models. Needs all clients in every round.
    Source: Huang et al. 2021, algorithm 1; FedALA, appendix G.
    Use it in cross-silo federations with all clients in every round that form unknown groups.

    Args:
        alpha: Strength of the attraction (FedALA: 1000).
        regularisation: lambda (FedALA: 1).
        sigma: Scale of squared distances between models (FedALA: 0.1).
        norm: `plain` takes the norm in a client's loss unsquared, as PFLlib does.
    """

    alpha: Positive = 1000.0
    regularisation: NonNegative = 1.0
    sigma: Positive = 0.1
    norm: Literal["squared", "plain"] = "squared"

    own_model: ClassVar[str] = "fedamp_model"
    one_model_each: ClassVar[bool] = True

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["distances"] = torch.zeros(plan.clients, plan.clients, dtype=torch.float64)

    def send(self, round: Round) -> Message:
        clients = torch.tensor(round.selected)
        return {"model": self._attention()[clients].to(self.state["models"]) @ self.state["models"]}

    def receive(self, round: Round, replies: Replies) -> None:
        super().receive(round, replies)
        self.state["distances"] = squared_distances(self.state["models"][:, : self.layout.trainable]).double()

    def diagnose(self) -> dict[str, float]:
        return {"fedamp_rescaled": float((self._pulls().sum(1) > 1).double().mean())}

    def _pulls(self) -> Tensor:
        """xi_ij for j != i before scaling, zero on the diagonal, `[N, N]` float64."""
        return ((self.alpha / self.sigma) * torch.exp(-self.state["distances"] / self.sigma)).fill_diagonal_(0)

    def _attention(self) -> Tensor:
        """xi, `[N, N]` float64 with rows that sum to 1."""
        pulls = self._pulls()
        pulls = pulls / pulls.sum(1, keepdim=True).clamp_min(1)
        return pulls + torch.diag(1 - pulls.sum(1))

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        # The start that a wrapper has made counts; otherwise a client goes on from its own model.
        model = start if SERVER_MODEL in inbox else cohort.memory.get(self.own_model, start)
        context = {"server_model": self.complete(cohort, server_model(inbox))[:, : cohort.layout.trainable]}
        strength = self.regularisation / self.alpha
        correction = proximal(strength) if self.norm == "squared" else _plain_proximal(strength / 2)
        model = cohort.fit(model, correction=correction, context=context).model
        cohort.memory[self.own_model] = model
        return model


def _plain_proximal(strength: float) -> Correction:
    """Return a correction by the gradient of strength ||w - u||, u the `server_model`; 0 where only rounding differs."""

    def correct(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
        difference = weights - context["server_model"]
        distance = difference.norm(dim=1, keepdim=True)
        rounding = 10 * torch.finfo(difference.dtype).eps * weights.norm(dim=1, keepdim=True)
        return gradient.add_(torch.where(distance > rounding, difference / distance, 0), alpha=strength)

    return correct


@algorithms.register("apple")
@dataclass
class Apple(EveryModel):
    """APPLE: adaptive personalised cross-silo learning. Client i's model theta_i = sum_j q_ij c_j mixes all N core models c_j.

    Per batch, with G = grad l(theta_i; b), a client trains its own core, c_i <- c_i - eta q_ii G, and its relations,
    q_ij <- q_ij - relation_rate (<G, c_j> + l(t) mu (q_ij - q0_j)), and mixes again; it uploads c_i. q0_j = n_j / sum n;
    l(t) = (cos(pi t / (L T)) + 1) / 2 while t < L T, then 0, with t the earlier rounds and L = `decline`.
    Steps are plain: momentum, weight decay and clipping of local training do not apply. Needs all clients in every round.
    theta_i is scored; the global model is the mean of the cores by samples. Traffic: 1 + N models.
    Source: Luo and Wu 2022, algorithm 1; FedALA, appendix G.
    Use it with few clients that are always there and fall into groups; every client downloads all core models.

    Args:
        relation_rate: Learning rate of the relations q.
        mu: Weight of the pull of q towards the shares of data q0.
        decline: Share of the rounds over which that pull falls to 0.
        initial: Start of q_i: q0 (`shares`, the authors), 1 / N (`uniform`, PFLlib) or the client itself (`own`).
        variant: `pfllib` multiplies eta by N, replaces <G, c_j> by the mean over tensors of mean(G * c_j), uploads theta_i.
    """

    relation_rate: NonNegative = 0.01
    mu: NonNegative = 0.1
    decline: Probability = 0.2
    initial: Literal["shares", "uniform", "own"] = "shares"
    variant: Literal["paper", "pfllib"] = "paper"

    own_model: ClassVar[str] = "apple_model"
    needs_total_rounds: ClassVar[bool] = True
    single_download: ClassVar[bool] = False
    fits_once: ClassVar[bool] = False

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_constant_rate("apple", plan.training)

    def send(self, round: Round) -> Message:
        sizes = self._sizes().to(self.state["models"])
        return {"cores": self.state["models"].unsqueeze(0), "shares": (sizes / sizes.sum()).unsqueeze(0)}

    def model(self) -> Tensor:
        return self.whole(self.state["initial"], weighted_mean(self.state["models"], self._sizes()))

    def _sizes(self) -> Tensor:
        return self.plan.sizes(torch.arange(self.plan.clients))

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        cores, shares = inbox["cores"][0], inbox["shares"]  # every client is sent the same cores [N, m]
        count, owner = cohort.layout.trainable, torch.tensor(cohort.clients, device=cores.device)
        trainable = cores[:, :count]
        rate = cohort.round.learning_rate * (len(cores) if self.variant == "pfllib" else 1)
        hold = self.strictness(cohort.round) * self.mu

        def mix(state: dict[str, Tensor]) -> None:
            relation, index = state["relation"], state["index"]
            mixed = torch.addcmul(relation.scatter(1, index, 0.0) @ trainable, relation.gather(1, index), state["core"])
            state["model"][:, :count] = mixed

        def step(state: dict[str, Tensor], batch: Batch) -> Tensor:
            loss, gradient = cohort.gradient(state["model"], batch)
            core, relation, index = state["core"], state["relation"], state["index"]
            scaled = gradient if self.variant == "paper" else mean_by_tensor(gradient, cohort.layout)
            products = (scaled @ trainable.T).scatter(1, index, (scaled * core).sum(1, keepdim=True))
            change = products + hold * (relation - state["shares"])
            core.addcmul_(relation.gather(1, index), gradient, value=-rate)
            relation.sub_(change, alpha=self.relation_rate)
            mix(state)
            return loss

        relation = cohort.memory.get("apple_relation", self._first_relation(shares, owner)).clone()
        state = {"core": trainable[owner], "relation": relation, "shares": shares, "index": owner.unsqueeze(1)}
        state["model"] = self.complete(cohort, relation @ cores)
        cohort.metrics["training_loss"] = cohort.each_batch(step, state, pad=True)
        mix(state)
        cohort.memory["apple_relation"], cohort.memory[self.own_model] = state["relation"], state["model"]
        uploaded = state["model"].clone()
        if self.variant == "paper":
            uploaded[:, :count] = state["core"]
        return self.upload(cohort, uploaded)

    def _first_relation(self, shares: Tensor, owner: Tensor) -> Tensor:
        if self.initial == "shares":
            return shares
        if self.initial == "uniform":
            return torch.full_like(shares, 1 / shares.shape[1])
        return torch.eye(shares.shape[1], dtype=shares.dtype, device=shares.device)[owner]

    def strictness(self, round: Round) -> float:
        """Return l(t), the weight of the pull of the relations towards the shares of data."""
        end, passed = self.decline * round.rounds, round.number - 1
        return (math.cos(math.pi * passed / end) + 1) / 2 if passed < end else 0.0


def mean_by_tensor(gradient: Tensor, layout: Layout) -> Tensor:
    """Return `gradient [k, T]`, each tensor divided by its size and by their number: PFLlib's product with a core."""
    tensors = [tensor for tensor in layout.slices if tensor.stop <= layout.trainable]
    return torch.cat([gradient[:, tensor.slice] / (tensor.stop - tensor.start) for tensor in tensors], 1) / len(tensors)
