import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.every_model import EveryModel
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.common.fields import NonNegative, Probability
from fedloom.flat.layout import Layout
from fedloom.flat.module import Batch
from fedloom.flat.population import weighted_mean


@algorithms.register("apple")
class Apple(EveryModel):
    """APPLE: adaptive personalised cross-silo learning. Client i's model theta_i = sum_j q_ij c_j
    mixes all N core models c_j.

    Per batch, with G = grad l(theta_i; b), a client trains its core, c_i <- c_i - eta q_ii G, and
    its relations, q_ij <- q_ij - relation_rate (<G, c_j> + l(t) mu (q_ij - q0_j)), and mixes again;
    it uploads c_i. q0_j = n_j / sum n; l(t) = (cos(pi t / (L T)) + 1) / 2 while t < L T, then 0,
    with t the earlier rounds and L = `decline`. Steps are plain: momentum, weight decay and
    clipping of local training do not apply. Needs all clients in every round. theta_i is scored;
    the global model is the mean of the cores by samples. Traffic: 1 + N models.
    Source: Luo and Wu 2022, algorithm 1; FedALA, appendix G.
    Use it with few, always available clients that form groups; every client downloads all core
    models.

    Args:
        relation_rate: Learning rate of the relations q.
        mu: Weight of the pull of q towards the shares of data q0.
        decline: Share of the rounds over which this pull falls to 0.
        initial: Initial value of q_i: q0 (`shares`, the authors) or 1 / N (`uniform`, PFLlib).
        variant: `pfllib` multiplies eta by N, replaces <G, c_j> by the mean over tensors of mean(G
            * c_j), and uploads theta_i.
    """

    relation_rate: NonNegative = 0.01
    mu: NonNegative = 0.1
    decline: Probability = 0.2
    initial: Literal["shares", "uniform"] = "shares"
    variant: Literal["paper", "pfllib"] = "paper"

    needs = (*EveryModel.needs, require_constant_rate)
    own_model: ClassVar[str] = "apple_model"
    base_facts = Facts(averages=False, needs_total_rounds=True, one_download=False, fits_once=False)

    # --- the server half ---

    def send(self, round: Round) -> Message:
        sizes = self.plan.sizes(torch.arange(self.plan.clients)).to(self.state["models"])
        return {
            "cores": self.state["models"].unsqueeze(0),
            "shares": (sizes / sizes.sum()).unsqueeze(0),
        }

    def model(self) -> Tensor:
        sizes = self.plan.sizes(torch.arange(self.plan.clients))
        return self.whole(self.state["initial"], weighted_mean(self.state["models"], sizes))

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        # All clients receive the same cores [N, m].
        cores = inbox["cores"][0]
        shares = inbox["shares"]
        count = cohort.layout.trainable
        owner = torch.tensor(cohort.clients, device=cores.device)
        trainable = cores[:, :count]
        rate = cohort.round.learning_rate * (len(cores) if self.variant == "pfllib" else 1)
        end = self.decline * cohort.round.rounds
        passed = self.plan.passed(cohort.round.number)
        hold = self.mu * (math.cos(math.pi * passed / end) + 1) / 2 if passed < end else 0.0

        def mix(state: dict[str, Tensor]) -> None:
            relation = state["relation"]
            index = state["index"]
            mixed = torch.addcmul(
                relation.scatter(1, index, 0.0) @ trainable,
                relation.gather(1, index),
                state["core"],
            )
            state["model"][:, :count] = mixed

        def step(state: dict[str, Tensor], batch: Batch) -> Tensor:
            loss, gradient = cohort.gradient(state["model"], batch)
            core = state["core"]
            relation = state["relation"]
            index = state["index"]
            scaled = (
                gradient if self.variant == "paper" else mean_by_tensor(gradient, cohort.layout)
            )
            products = (scaled @ trainable.T).scatter(
                1, index, (scaled * core).sum(1, keepdim=True)
            )
            change = products + hold * (relation - state["shares"])
            core.addcmul_(relation.gather(1, index), gradient, value=-rate)
            relation.sub_(change, alpha=self.relation_rate)
            mix(state)
            return loss

        initial = shares if self.initial == "shares" else torch.full_like(shares, 1 / len(cores))
        relation = cohort.memory.get("apple_relation", initial).clone()
        state = {
            "core": trainable[owner],
            "relation": relation,
            "shares": shares,
            "index": owner.unsqueeze(1),
        }
        state["model"] = self.complete(cohort, relation @ cores)
        cohort.metrics["training_loss"] = cohort.each_batch(step, state, pad=True)
        mix(state)
        cohort.memory["apple_relation"], cohort.memory[self.own_model] = (
            state["relation"],
            state["model"],
        )
        uploaded = state["model"].clone()
        if self.variant == "paper":
            uploaded[:, :count] = state["core"]
        return self.upload(cohort, uploaded)


def mean_by_tensor(gradient: Tensor, layout: Layout) -> Tensor:
    """Divide each tensor of a gradient by its size and by the number of tensors: PFLlib's product
    with a core.

    Args:
        gradient: Gradients of the trainable parameters, `[k, T]`.
        layout: Layout of the model.

    Returns:
        The scaled gradients, `[k, T]`.
    """
    tensors = [tensor for tensor in layout.slices if tensor.stop <= layout.trainable]
    return torch.cat(
        [gradient[:, tensor.slice] / (tensor.stop - tensor.start) for tensor in tensors], 1
    ) / len(tensors)
