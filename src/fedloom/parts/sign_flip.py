from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedloom.algorithm.method import algorithms
from fedloom.algorithm.records import Message, Plan
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Finite
from fedloom.common.randomness import stream
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part, shared_trainable


@algorithms.register("sign_flip")
class SignFlip(Part):
    """An attack in a simulation: malicious clients upload w - `scale` d_i instead of their model w
    + d_i.

    w is the model that the client received. round(`share` N) of the N clients are malicious in all
    rounds, drawn by the run's seed. Batch-norm statistics stay honest, and malicious clients store
    their honest state.
    Source: Li et al. 2019, "RSA: Byzantine-robust stochastic aggregation methods", sign-flipping
    attack.
    Use it to measure how much a method or a robust rule loses under an attack.

    Args:
        share: Share of malicious clients; 0 is no attack.
        scale: Factor of the flipped update; -1 is the honest update.
    """

    share: Annotated[float, Field(ge=0, lt=1)] = 0.2
    scale: Finite = 1.0

    requires: ClassVar[tuple[str, ...]] = ("one update",)

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        if plan.remote:
            raise InvalidValue("sign_flip only simulates an attack. Remove it over real sites")
        order = torch.randperm(plan.clients, generator=stream(plan.seed, "malicious"))
        self.malicious = frozenset(order[: round(self.share * plan.clients)].tolist())

    def corrupt(self, cohort: Cohort, inbox: Message, reply: Message, inner: Inner) -> Message:
        attacks = torch.tensor([client in self.malicious for client in cohort.clients])
        if not bool(attacks.any()):
            return reply
        size = shared_trainable(inner)
        sent = inbox["model"]
        honest = reply["model"]
        model = honest.clone()
        model[:, :size] = sent[:, :size] - self.scale * (honest[:, :size] - sent[:, :size])
        attacks = attacks.to(honest.device).unsqueeze(1)
        return {**reply, "model": torch.where(attacks, model, honest)}
