"""FedMR, which shuffles the layers of client models instead of averaging them, and Indep, which
leaves the models unchanged.
"""

import math
from dataclasses import field, replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Strict
from torch import Tensor

from fedloom.algorithm import Algorithm, Cohort, Facts, Round, algorithms, is_personal
from fedloom.algorithm.records import Message, Plan, Replies
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import NonNegative, Share
from fedloom.flat.layout import Unit, UnitKind
from fedloom.flat.population import (
    mean_cosine_similarity,
    recombine_,
    total_variance,
    weighted_mean,
)

Schedule = float | list[Annotated[tuple[int, float], Strict(False)]]
"""A share in [0, 1], or pairs [round, share] with linear interpolation between them."""


@algorithms.register("indep")
class Indep(Algorithm):
    """Independent training (FedMR without recombination): K models that travel from client to
    client and never mix.

    The k-th selected client receives and trains slot k of the pool `[K, P]`; if this client drops
    out, the slot stays unchanged. The global model is the unweighted mean of the pool.
    Source: FedMR, section 3.
    Use it to measure what recombination contributes to `fedmr`; it is not a method to deploy.

    Args:
        local: Method with the client half that trains, such as `fedprox(mu=0.01)`; none is plain
            SGD. Its server half never runs: the method must send and return one model (not
            SCAFFOLD) and work on the clients (not a server optimizer).
    """

    local: Algorithm | None = field(default=None, kw_only=True)

    @property
    def facts(self) -> Facts:
        """The facts of `local`, with a pool on the server."""
        local = Facts() if self.local is None else self.local.facts
        deploys = "received"
        if self.local is not None and is_personal(self.local):
            deploys = local.deploys or "start"
        return replace(
            local,
            deploys=deploys,
            averages=False,
            fixed_participants=True,
            one_model_each=True,
            anonymous=True,
        )

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state = {"pool": plan.initial.expand(plan.participants, -1)}
        if self.local is not None:
            self.local.setup(plan)
            _require_local(self.local, plan)

    def send(self, round: Round) -> Message:
        return {"model": self.state["pool"][: len(round.selected)]}

    def receive(self, round: Round, replies: Replies) -> None:
        self.state["pool"] = replies.by_slot("model")

    def model(self) -> Tensor:
        return weighted_mean(self.state["pool"])

    def diagnose(self) -> dict[str, float]:
        return {
            "pool_cosine": float(
                mean_cosine_similarity(self.state["pool"][:, : self.plan.layout.trainable])
            )
        }

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return (
            super().train(cohort, inbox) if self.local is None else self.local.train(cohort, inbox)
        )

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        return inbox["model"] if self.local is None else self.local.personalise(cohort, inbox)


@algorithms.register("fedmr")
class FedMR(Indep):
    """Federated model recombination: every layer of the K uploaded models is shuffled over the
    models.

    For each unit u of layers an independent uniform permutation pi_u of {1..K}; new pool[k, u] =
    upload[pi_u(k), u] for the pool `[K, P]`. All models start equal; the global model is the
    unweighted mean of the pool, which recombination preserves (Lemma 4.4).
    Source: Hu et al., arXiv 2208.07677, algorithm 1; KDD 2024.
    Use it when clients' labels are skewed and averaging stalls in sharp minima; it needs many
    rounds, or averaging first (`stages`).

    Args:
        unit: Unit of the shuffle: a `layer` (a module with its weight, bias and statistics), a
            `tensor` (the authors' code) or a `segment` of layers (FedMR-px).
        fraction: Share x of the N layers in a segment: layer j belongs to segment ceil(j / (x N)).
        blend: How far each model then moves to the pool's mean: 0 is FedMR, 1 FedAvg with equal
            weights. Pairs [round, share] are joined linearly; with `auto` the server chooses
            (docs/methods/recombination.md).
        tolerance: Spread of the models that `auto` allows, relative to their common progress: 0 is
            FedAvg.
    """

    unit: UnitKind = "layer"
    fraction: Share = 1.0
    blend: Schedule | Literal["auto"] = 0.0
    tolerance: NonNegative = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blend != "auto":
            require_schedule("blend", self.blend)

    @property
    def facts(self) -> Facts:
        # `auto` averages by samples, so it needs the clients' numbers of samples.
        return replace(super().facts, anonymous=self.blend != "auto")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        if self.blend == "auto":
            self.state |= {
                "initial": plan.initial.clone(),
                "blend": torch.zeros(1, dtype=torch.float64),
            }

    def receive(self, round: Round, replies: Replies) -> None:
        pool = replies.by_slot("model")
        if self.blend == "auto":
            average = weighted_mean(pool, replies.weights_by_slot())  # 0 for clients without reply
            sent = replies.sent_by_slot("model")
            trainable = self.plan.layout.trainable
            share = auto_blend(
                pool, sent, average, self.state["initial"], trainable, self.tolerance
            )
            self.state["blend"] = torch.tensor([share], dtype=torch.float64)
        else:
            average = None
            share = blend_at(self.blend, round.number)
        # This releases the models that were sent, since recombination needs memory.
        self.state["pool"] = pool
        # In place, since only this method uses the matrix of this round's replies.
        recombine_(pool, self.units(), round.stream("recombine"))
        if share > 0:
            pool.lerp_(weighted_mean(pool) if average is None else average, share)

    def units(self) -> list[Unit]:
        return self.plan.layout.units(self.unit, self.fraction)

    def diagnose(self) -> dict[str, float]:
        figures = super().diagnose()
        if self.blend == "auto":
            figures["blend"] = float(self.state["blend"])
        # A later stage starts from another model than the initial one.
        elif self.blend == 0.0 and self.plan.first_round == 1:
            figures["pool_progress"] = pool_progress(
                self.state["pool"], self.plan.initial, self.plan.layout.trainable
            )
        return figures


def pool_progress(pool: Tensor, initial: Tensor, trainable: int) -> float:
    """Return T / S, the progress of a pool relative to its spread.

    T is the squared distance of the pool's mean from the initial model, S the variance of the pool.

    Args:
        pool: Models, `[K, P]`.
        initial: Initial model, `[P]`.
        trainable: Number of trainable columns, which come first.

    Returns:
        The ratio; infinity for equal models.
    """
    spread = float(total_variance(pool[:, :trainable]))
    return (
        float((weighted_mean(pool) - initial)[:trainable].square().sum()) / spread
        if spread > 0
        else math.inf
    )


def auto_blend(
    pool: Tensor, sent: Tensor, average: Tensor, initial: Tensor, trainable: int, tolerance: float
) -> float:
    """Return the blend b = max(0, 1 - (tolerance T)^2 / (S U)); 0 if all models or all updates are
    equal.

    T = |average - initial|^2 is the common progress, S the variance of the pool and U the variance
    of its updates.

    Args:
        pool: Uploads, `[K, P]`.
        sent: The models before training, `[K, P]`.
        average: Mean of the uploads by samples, `[P]`.
        initial: Initial model, `[P]`.
        trainable: Number of trainable columns, which come first.
        tolerance: Allowed spread relative to T.

    Returns:
        The share b of the average in each model, in [0, 1].
    """
    bound = tolerance * float((average - initial)[:trainable].square().sum())
    pool = pool[:, :trainable]
    sent = sent[:, :trainable]
    spread = float(total_variance(pool)) * float(total_variance(pool, since=sent))
    return max(0.0, 1.0 - bound * bound / spread) if spread > 0 else 0.0


def require_schedule(name: str, schedule: Schedule) -> None:
    """Raise `InvalidValue` unless shares are in [0, 1] and rounds increase from at least 1.

    Args:
        name: Name of the setting, with which errors begin.
        schedule: A constant share, or pairs of a round and a share.
    """
    pairs = schedule if isinstance(schedule, list) else [(1, schedule)]
    rounds = [number for number, _ in pairs]
    if not rounds or [0, *rounds] != sorted({0, *rounds}):
        raise InvalidValue(
            f"{name}: rounds must start at 1 or later and increase, not {rounds}. "
            "Example: [[1, 1.0], [100, 0.0]]"
        )
    for _, share in pairs:
        if not 0 <= float(share) <= 1:
            raise InvalidValue(f"{name}: a share must be between 0 and 1, not {share}")


def blend_at(schedule: Schedule, number: int) -> float:
    """Return the share of round `number` in a schedule.

    Args:
        schedule: A constant share, or pairs of a round and a share.
        number: Number of the round, from 1.

    Returns:
        The share in [0, 1]. Before the first pair and after the last one it is constant.
    """
    rounds, shares = (
        zip(*schedule, strict=True) if isinstance(schedule, list) else ((1,), (schedule,))
    )
    return float(np.interp(number, rounds, shares))


def _require_local(local: Algorithm, plan: Plan) -> None:
    """Raise `InvalidValue` unless the client half of `local` can train a model of the pool."""
    if local._inner():
        raise InvalidValue(
            f"local={local} wraps another method: put the wrapper around fedmr, as in ala(fedmr)"
        )
    # Check a later round, since some tensors are not sent in the first, such as a teacher.
    later = replace(plan.opening(), number=plan.first_round + 1)
    message = local.send(later)
    expected = dict(local.expects(later))
    if message.keys() != {"model"} or expected != {"model": (plan.layout.size,)}:
        raise InvalidValue(
            f"local={local} does not exchange exactly one whole model. "
            "Recombination needs a method that does, such as fedprox"
        )
    trains_plainly = type(local).train is Algorithm.train and type(local) is not FedAvg
    if trains_plainly or len(message["model"]) > 1:
        raise InvalidValue(
            f"local={local} differs from fedavg only on the server, where recombination replaces "
            "it. Choose a method that changes local training, such as fedprox"
        )
