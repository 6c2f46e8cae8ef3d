"""APPLE: each client learns its own mixture of all clients' core models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Message, Plan, Replies, algorithms
from fedloom.algorithms.sharing import PartlyShared, length, put, require_everybody, take
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.config.fields import NonNegative, Probability
from fedloom.flat.module import Batch
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort
from fedloom.round import Round


@algorithms.register("apple")
@dataclass
class Apple(PartlyShared):
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
    single_download: ClassVar[bool] = False
    fits_once: ClassVar[bool] = False
    averages: ClassVar[bool] = False

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_everybody("apple", plan)
        require_constant_rate("apple", plan.training)
        core = take(plan.initial.unsqueeze(0), self._unit)
        # A view without memory of its own, until the first cores arrive.
        self.state = {"initial": plan.initial.clone(), "cores": core.expand(plan.clients, length(self._unit))}

    def send(self, round: Round) -> Message:
        sizes = self.plan.sizes(torch.arange(self.plan.clients)).to(self.state["cores"])
        return {"cores": self.state["cores"].unsqueeze(0), "shares": (sizes / sizes.sum()).unsqueeze(0)}

    def receive(self, round: Round, replies: Replies) -> None:
        cores = self.state["cores"].clone()
        cores[replies.clients] = replies["model"]
        self.state["cores"] = cores

    def model(self) -> Tensor:
        mean = weighted_mean(self.state["cores"], self.plan.sizes(torch.arange(self.plan.clients)))
        return put(self.state["initial"].unsqueeze(0), self._unit, mean.unsqueeze(0))[0]

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        cores, shares = inbox["cores"][0], inbox["shares"]  # every client is sent the same cores [N, m]
        count = cohort.layout.trainable
        index = torch.tensor(cohort.clients, device=cores.device)
        relation = cohort.memory.get("apple_relation", self._first_relation(shares, index)).clone()
        state = {"core": cores[index, :count], "relation": relation, "shares": shares, "index": index.unsqueeze(1)}
        state["model"] = self.complete(cohort, relation @ cores)
        step = _RelationStep(self, cohort, cores)
        cohort.metrics["training_loss"] = cohort.each_batch(step, state, pad=True)
        step.mix(state)
        cohort.memory["apple_relation"], cohort.memory[self.own_model] = state["relation"], state["model"]
        uploaded = state["model"].clone()
        if self.variant == "paper":
            uploaded[:, :count] = state["core"]
        return self.upload(cohort, uploaded)

    def _first_relation(self, shares: Tensor, index: Tensor) -> Tensor:
        if self.initial == "shares":
            return shares
        if self.initial == "uniform":
            return torch.full_like(shares, 1 / shares.shape[1])
        return torch.eye(shares.shape[1], dtype=shares.dtype, device=shares.device)[index]

    @property
    def needs_total_rounds(self) -> bool:
        return True

    def strictness(self, round: Round) -> float:
        """Return l(t), the weight of the pull of the relations towards the shares of data."""
        end, passed = self.decline * round.rounds, round.number - 1
        return (math.cos(math.pi * passed / end) + 1) / 2 if passed < end else 0.0


class _RelationStep:
    """One step of local training on the downloaded `cores [N, m]`."""

    def __init__(self, method: Apple, cohort: Cohort, cores: Tensor) -> None:
        self.method, self.cohort = method, cohort
        self.count = cohort.layout.trainable
        self.cores = cores[:, : self.count]
        self.rate = cohort.round.learning_rate * (len(cores) if method.variant == "pfllib" else 1)
        self.hold = method.strictness(cohort.round) * method.mu

    def __call__(self, state: dict[str, Tensor], batch: Batch) -> Tensor:
        loss, gradient = self.cohort.gradient(state["model"], batch)
        core, relation, index = state["core"], state["relation"], state["index"]
        change = self._products(gradient, core, index) + self.hold * (relation - state["shares"])
        core.addcmul_(relation.gather(1, index), gradient, value=-self.rate)
        relation.sub_(change, alpha=self.method.relation_rate)
        self.mix(state)
        return loss

    def mix(self, state: dict[str, Tensor]) -> None:
        """Compute theta_i from the downloaded cores and the client's own core as trained so far."""
        relation, index = state["relation"], state["index"]
        weights = relation.scatter(1, index, 0.0)
        state["model"][:, : self.count] = torch.addcmul(weights @ self.cores, relation.gather(1, index), state["core"])

    def _products(self, gradient: Tensor, core: Tensor, index: Tensor) -> Tensor:
        """Return <G, c_j> for every core, `[k, N]`, or its substitute in the variant."""
        if self.method.variant == "paper":
            return (gradient @ self.cores.T).scatter(1, index, (gradient * core).sum(1, keepdim=True))
        tensors = [tensor for tensor in self.cohort.layout.slices if tensor.stop <= self.count]
        scaled = torch.cat([gradient[:, tensor.slice] / (tensor.stop - tensor.start) for tensor in tensors], 1) / len(
            tensors
        )
        return (scaled @ self.cores.T).scatter(1, index, (scaled * core).sum(1, keepdim=True))
