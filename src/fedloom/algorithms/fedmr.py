"""FedMR: recombine the layers of the clients' models instead of averaging them; and Indep, the same without recombination."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Plan, Replies, algorithms
from fedloom.checks import require_one_of, require_share
from fedloom.layout import UnitKind
from fedloom.population import mean_cosine_similarity, recombine
from fedloom.round import Round


@algorithms.register("indep")
@dataclass
class Indep(Algorithm):
    """Independent training (FedMR without recombination): K models that travel from client to client and never mix.

    Slot k of the pool `[K, P]` goes to the k-th selected client and comes back trained; a client that drops out leaves its
    slot as it was sent. The global model is the unweighted mean of the pool. Source: FedMR, section 3.
    """

    def setup(self, plan: Plan) -> None:
        self.plan = plan
        self.state = {"pool": plan.initial.repeat(plan.participants, 1)}

    def send(self, round: Round) -> Message:
        return {"model": self.state["pool"][: len(round.selected)]}

    def receive(self, round: Round, replies: Replies) -> None:
        self.state["pool"][replies.slots] = replies["model"]

    def model(self) -> Tensor:
        return self.state["pool"].mean(0)

    def diagnose(self) -> dict[str, float]:
        return {"pool_cosine": float(mean_cosine_similarity(self.state["pool"][:, : self.layout.trainable]))}


@algorithms.register("fedmr")
@dataclass
class FedMR(Indep):
    """Federated model recombination: every layer of the K uploaded models is shuffled over the models.

    For each unit u an independent uniform permutation pi_u of {1..K}; new pool[k, u] = upload[pi_u(k), u]. All models start
    equal; the global model is the unweighted mean of the pool, which recombination preserves (Lemma 4.4).
    `unit` is what moves together: a `layer` (a module with its weight, bias and statistics), a single `tensor` (what the
    authors' code shuffles), or a `segment` of layers: with N layers, layer j belongs to segment ceil(j / (fraction N))
    (FedMR-px). Source: Hu et al., arXiv 2208.07677, algorithm 1; KDD 2024.
    """

    unit: UnitKind = "layer"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        require_one_of("unit", self.unit, ("layer", "tensor", "segment"))
        require_share("fraction", self.fraction)

    def receive(self, round: Round, replies: Replies) -> None:
        super().receive(round, replies)
        units = self.layout.units(self.unit, self.fraction)
        self.state["pool"] = recombine(self.state["pool"], units, round.stream("recombine"))
