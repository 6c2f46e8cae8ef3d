"""FedMR: recombine the layers of the clients' models instead of averaging them; and Indep, the same without recombination."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Strict
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Plan, Replies, algorithms, describe
from fedloom.algorithms.fedavg import FedAvg
from fedloom.config.checks import require_at_least, require_between, require_one_of, require_share
from fedloom.errors import InvalidValue
from fedloom.flat.layout import UnitKind
from fedloom.flat.population import mean_cosine_similarity, recombine_
from fedloom.local.cohort import Cohort
from fedloom.round import Round

Blend = float | list[Annotated[tuple[int, float], Strict(False)]]
"""A share in [0, 1], or [round, share] pairs between which it changes linearly."""


@algorithms.register("indep")
@dataclass
class Indep(Algorithm):
    """Independent training (FedMR without recombination): K models that travel from client to client and never mix.

    Slot k of the pool `[K, P]` goes to the k-th selected client and comes back trained; a client that drops out leaves its
    slot as it was sent. The global model is the unweighted mean of the pool.

    `local` is the method whose client half trains, such as `local=fedprox(mu=0.01)`; plain SGD by default. It may be any method
    that is sent one model and returns one: its server half never runs, so a method that is sent more (SCAFFOLD's variate) or
    whose work is done on the server alone (a server optimizer) is refused. Source: FedMR, section 3.
    Use it to see what recombination itself brings to `fedmr`; it is no method to deploy.
    """

    local: Algorithm | None = field(default=None, kw_only=True)

    wraps: ClassVar[tuple[str, ...]] = ("local",)

    def setup(self, plan: Plan) -> None:
        self.plan = plan
        self.state = {"pool": plan.initial.repeat(plan.participants, 1)}
        if self.local is not None:
            self.local.setup(plan)
            _require_local(self.local, plan)

    def send(self, round: Round) -> Message:
        return {"model": self.state["pool"][: len(round.selected)]}

    def receive(self, round: Round, replies: Replies) -> None:
        if len(replies) == len(self.state["pool"]):
            self.state["pool"] = replies["model"]
        else:
            self.state["pool"] = self.state["pool"].index_copy(
                0, replies.slots.to(replies["model"].device), replies["model"]
            )

    def model(self) -> Tensor:
        return self.state["pool"].mean(0)

    def diagnose(self) -> dict[str, float]:
        return {"pool_cosine": float(mean_cosine_similarity(self.state["pool"][:, : self.layout.trainable]))}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return super().train(cohort, inbox) if self.local is None else self.local.train(cohort, inbox)


@algorithms.register("fedmr")
@dataclass
class FedMR(Indep):
    """Federated model recombination: every layer of the K uploaded models is shuffled over the models.

    For each unit u an independent uniform permutation pi_u of {1..K}; new pool[k, u] = upload[pi_u(k), u]. All models start
    equal; the global model is the unweighted mean of the pool, which recombination preserves (Lemma 4.4).
    `unit` is what moves together: a `layer` (a module with its weight, bias and statistics), a single `tensor` (what the
    authors' code shuffles), or a `segment` of layers: with N layers, layer j belongs to segment ceil(j / (fraction N))
    (FedMR-px). `local` trains as Indep's does.

    `blend` b then moves every model towards the mean m of the pool, pool[k] <- (1 - b) pool[k] + b m, statistics included: 0 is
    FedMR, 1 is FedAvg with equal weights from the next round on (a combination that the paper leaves open). It is a share, or
    [round, share] pairs, linear in between and constant outside: `blend=[[1, 1.0], [100, 0.0]]`.
    Source: Hu et al., arXiv 2208.07677, algorithm 1; KDD 2024.
    Use it when clients' labels are skewed and averaging stalls in sharp minima; give it rounds, or averaging first
    (`stages`).
    """

    unit: UnitKind = "layer"
    fraction: float = 1.0
    blend: Blend = 0.0

    def __post_init__(self) -> None:
        require_one_of("unit", self.unit, ("layer", "tensor", "segment"))
        require_share("fraction", self.fraction)
        _require_blend(self.blend)

    def receive(self, round: Round, replies: Replies) -> None:
        super().receive(round, replies)
        units = self.layout.units(self.unit, self.fraction)
        # The matrix is this round's own, made by the federation for the replies or by Indep: nobody else holds it.
        pool = recombine_(self.state["pool"], units, round.stream("recombine"))
        share = blend_at(self.blend, round.number)
        if share > 0:
            pool = pool.lerp(pool.mean(0), share)
        self.state["pool"] = pool


def blend_at(blend: Blend, number: int) -> float:
    """The share of round `number`."""
    if not isinstance(blend, list):
        return blend
    rounds, shares = zip(*blend, strict=True)
    return float(np.interp(number, rounds, shares))


def _require_blend(blend: Blend) -> None:
    if not isinstance(blend, list):
        require_between("blend", blend, 0, 1)
        return
    rounds = [number for number, _ in blend]
    if not rounds or rounds != sorted(set(rounds)):
        raise InvalidValue(f"blend: rounds must grow, as in blend=[[1, 1.0], [100, 0.0]], not {rounds}")
    require_at_least("blend: the first round", rounds[0], 1)
    for _, share in blend:
        require_between("blend: a share", share, 0, 1)


def _require_local(local: Algorithm, plan: Plan) -> None:
    """Raise `InvalidValue` with the reason unless the client half of `local` can train a model of the pool."""
    name = describe(local)
    if local.inner():
        raise InvalidValue(f"local={name} wraps another method: put the wrapper around fedmr, as in ala(fedmr)")
    message, expected = local.send(plan.opening()), dict(local.expects(plan.opening()))
    more = sorted(message.keys() - {"model"}) + sorted(expected.keys() - {"model"})
    if more:
        raise InvalidValue(f"local={name} exchanges {more[0]!r} beside the model, which recombination does not carry")
    if expected.get("model") != (plan.layout.size,):
        raise InvalidValue(f"local={name} does not return a whole model, which recombination needs")
    trains_plainly = type(local).train is Algorithm.train and not isinstance(local, FedAvg)
    if trains_plainly or len(message["model"]) > 1:
        raise InvalidValue(f"local={name} differs from fedavg on the server alone, where recombination takes its place")
