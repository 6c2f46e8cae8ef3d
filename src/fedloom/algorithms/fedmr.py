"""FedMR: recombine the layers of the clients' models instead of averaging them; and Indep, the same without recombination."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Strict
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Plan, Replies, algorithms, describe
from fedloom.algorithms.fedavg import FedAvg
from fedloom.config.fields import NonNegative, Share
from fedloom.errors import InvalidValue
from fedloom.flat.layout import UnitKind
from fedloom.flat.population import mean_cosine_similarity, recombine_, total_variance, weighted_mean
from fedloom.local.cohort import Cohort
from fedloom.round import Round

Blend = float | list[Annotated[tuple[int, float], Strict(False)]] | Literal["auto"]
"""A share in [0, 1], [round, share] pairs between which it changes linearly, or "auto": chosen by the server in each round."""


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
    averages: ClassVar[bool] = False
    fixed_participants: ClassVar[bool] = True

    @property
    def anonymous_replies(self) -> bool:
        return True

    def setup(self, plan: Plan) -> None:
        self.plan = plan
        self.state = {"pool": plan.initial.expand(plan.participants, -1)}
        if self.local is not None:
            self.local.setup(plan)
            _require_local(self.local, plan)

    def send(self, round: Round) -> Message:
        return {"model": self.state["pool"][: len(round.selected)]}

    def receive(self, round: Round, replies: Replies) -> None:
        self.state["pool"] = replies.by_slot("model", self.state["pool"])

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

    `blend="auto"` lets the server choose b in each round from what it sent and received, without data or traffic. With w_0 the
    model that all started from, w_k the uploads, v_k what was sent for them, m the mean of the uploads weighted by samples
    (FedAvg's model), and var(x) = (1/K) sum_k |x_k - mean(x)|^2, over the trainable parameters:

        T = |m - w_0|^2,   S = var(w),   U = var(w - v),
        b = max(0, 1 - (tolerance T)^2 / (S U)),   pool[k] <- (1 - b) pool[k] + b m

    T is what the models have learned in common, S what each has learned by itself, U the part of it that this round added. The
    mean of the pool keeps T and loses S, so it stops being a model where S is not small beside T; and how small it must be
    depends on how far training has come: models that part early end in different minima, models that part late in one. U / T,
    which falls as training settles, tells early from late. So the geometric mean of S and U is held below `tolerance` times T:
    blending multiplies S by (1 - b)^2, so that S U becomes (tolerance T)^4 / (S U), the less the further the pool has come apart.
    Where S U is below (tolerance T)^2, as once rounds add little, b is 0 and the method is FedMR. A tolerance of 0 is FedAvg,
    and 0.02 keeps more of what recombination wins but no longer holds every pool. The figure `blend` records b.
    Source: Hu et al., arXiv 2208.07677, algorithm 1; KDD 2024.
    Use it when clients' labels are skewed and averaging stalls in sharp minima; give it rounds, or averaging first
    (`stages`).
    """

    unit: UnitKind = "layer"
    fraction: Share = 1.0
    blend: Blend = 0.0
    tolerance: NonNegative = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blend == "auto":
            return
        pairs = self.blend if isinstance(self.blend, list) else [(1, self.blend)]
        rounds = [number for number, _ in pairs]
        if not rounds or [0, *rounds] != sorted({0, *rounds}):
            raise InvalidValue(f"blend: rounds must grow from 1 on, as in [[1, 1.0], [100, 0.0]], not {rounds}")
        for _, share in pairs:
            if not 0 <= share <= 1:
                raise InvalidValue(f"blend: a share must be between 0 and 1, not {share}")

    @property
    def anonymous_replies(self) -> bool:
        return self.blend != "auto"  # which averages by samples

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        if self.blend == "auto":
            self.state |= {"initial": plan.initial.clone(), "blend": torch.zeros(1, dtype=torch.float64)}

    def receive(self, round: Round, replies: Replies) -> None:
        pool = replies.by_slot("model", self.state["pool"])
        if self.blend == "auto":
            average = weighted_mean(replies["model"], replies.weights)
            share = auto_blend(
                pool, self.state["pool"], average, self.state["initial"], self.layout.trainable, self.tolerance
            )
            self.state["blend"] = torch.tensor([share], dtype=torch.float64)
        else:
            average, share = None, blend_at(self.blend, round.number)
        self.state["pool"] = pool  # what was sent is let go before the recombination, which needs memory of its own
        # The matrix is this round's own, made by the federation for the replies: nobody else holds it.
        recombine_(pool, self.layout.units(self.unit, self.fraction), round.stream("recombine"))
        if share > 0:
            pool.lerp_(pool.mean(0) if average is None else average, share)

    def diagnose(self) -> dict[str, float]:
        chosen = {"blend": float(self.state["blend"])} if self.blend == "auto" else {}
        return super().diagnose() | chosen


def auto_blend(pool: Tensor, sent: Tensor, average: Tensor, initial: Tensor, trainable: int, tolerance: float) -> float:
    """b = max(0, 1 - (tolerance T)^2 / (S U)) over the first `trainable` numbers of the pool `[K, P]` (`FedMR`): of models that
    were `sent [K, P]`, started from `initial [P]` and average to `average [P]`. 0 where all are equal or have gained the same."""
    bound = tolerance * float((average - initial)[:trainable].square().sum())
    pool, sent = pool[:, :trainable], sent[:, :trainable]
    spread = float(total_variance(pool)) * float(total_variance(pool, since=sent))
    return max(0.0, 1.0 - bound * bound / spread) if spread > 0 else 0.0


def blend_at(blend: Blend, number: int) -> float:
    """The share of round `number`, where it is not chosen by the server."""
    if not isinstance(blend, list):
        return float(blend)
    rounds, shares = zip(*blend, strict=True)
    return float(np.interp(number, rounds, shares))


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
