from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan
from fedloom.algorithms.fedspeed import FedSpeed
from fedloom.algorithms.sharpness import direction, gradient_ahead, normalised
from fedloom.flat.module import Batch
from fedloom.local.cohort import Cohort, Context


@algorithms.register("fedsmoo")
class FedSMOO(FedSpeed):
    """FedSMOO: FedSpeed with perturbations e that are drawn together across clients, by a dual mu_i
    of each client and a common s.

    In each step, e = rho u / ||u|| with u = g - mu_i - s, and mu_i <- mu_i + e - s; the gradient is
    taken at w + e. Clients keep mu_i and upload it; server: s <- rho m / ||m|| with m = mean_i mu_i
    over the round. Both are 0 at first, `[T]`. Traffic: two vectors down, two up.
    Source: Sun et al. 2023 (ICML), algorithm 1, in the form of the authors' code.
    Use it when FedSpeed's clients find different flat regions, and traffic is cheap.
    """

    sends: ClassVar[tuple[str, ...]] = ("model", "perturbation")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["perturbation"] = torch.zeros_like(self.state["drift"])

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "dual": (self.plan.layout.trainable,)}

    def update(self, round: Round, aggregate: Aggregate) -> None:
        super().update(round, aggregate)
        self.state["perturbation"] = normalised(aggregate.total["dual"], self.rho)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        common = inbox["perturbation"]
        dual = cohort.memory.get("fedsmoo_dual", torch.zeros_like(common)).clone()

        def gradient_fn(rows: Tensor, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
            loss, gradient = cohort.gradient(rows, batch)
            offset = gradient - context["dual"] - context["common"]
            offset = self.rho * direction(offset)
            context["dual"].add_(offset - context["common"])
            return loss, gradient_ahead(cohort, rows, batch, offset)[1]

        state = {"dual": dual, "common": common.clone()}
        reply = self.descend(cohort, inbox, gradient_fn, state)
        cohort.memory.write("fedsmoo_dual", state["dual"], cohort.uploads)
        return {**reply, "dual": state["dual"]}
