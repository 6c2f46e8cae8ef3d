import math
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Aggregate, Plan, Replies, Selection, uniform
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Positive
from fedloom.common.round import Round
from fedloom.parts.accounting import epsilon, noise_for
from fedloom.parts.gaussian_noise import clipped, normal
from fedloom.parts.hooks import Inner
from fedloom.parts.privacy import Accounted, OpenShare


@algorithms.register("private")
class Private(Accounted):
    """Central differential privacy of clients, around any method that averages: clipped updates, a
    noisy sum, a fixed divisor.

    With u_k = w_k - w the update of client k, C = `clip`, z = `noise` and q N the expected
    participants, every reply becomes

        w + (sum_k u_k min(1, C / |u_k|) + z C n) / (q N),    n standard normal

    so that the models do not reveal whether a client took part. All clients have the same weight,
    independent of their samples. Each must take part independently with probability q
    (`participation_mode = "poisson"`), or all in every round; rounds without replies add noise.

    Noise comes from the run's streams in a simulation, and from the system's cryptographic
    generator over real sites. The server sees updates without noise, so clients must trust it.
    Recorded losses and accuracies are not private. The list of participants of each round is not
    private either: if it is published, there is no amplification by sampling, and epsilon is the
    value for participation 1.
    Source: McMahan et al. 2018, "Learning differentially private recurrent language models",
    algorithm 1; Andrew et al. 2021, "Differentially private learning with adaptive clipping",
    algorithm 1.
    Use it when others receive the model, and hundreds of clients can take part in a round.

    Args:
        quantile: g, the share of updates that C should not clip: with b_k = 1 where |u_k| <= C,
            else 0, each round ends with C <- C exp(-`clip_learning_rate` (b - g)), b = 1/2 + (sum_k
            (b_k - 1/2) + s n) / (q N), s = q N / 20. The noise of the sum is raised to (z^-2 - (2
            s)^-2)^(-1/2), so that both together cost the same as z. None leaves C constant.
        clip_learning_rate: Step size of C (Andrew et al.: 0.2).
    """

    quantile: OpenShare | None = None
    clip_learning_rate: Positive = 0.2

    hint: ClassVar[str] = "; use local_private, in which each client adds noise"
    requires: ClassVar[tuple[str, ...]] = (
        "only the model",
        "one update",
        "no integers",
        "averages",
        "one model for all",
    )

    @property
    def facts(self) -> Facts:
        return Facts(
            needs_total_rounds=self.noise is None,
            needs_every_reply=True,
        )

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state["releases"] = torch.zeros(1, dtype=torch.int64)
        if self.quantile is not None:
            self.state["clip"] = torch.tensor([self.clip], dtype=torch.float64)
        self.select(plan.opening(), inner)

    def cost(self, extra: int = 0) -> float:
        share = self.plan.participants / self.plan.clients
        return epsilon(
            self.noise_multiplier(), share, int(self.state["releases"]) + extra, self.delta
        )

    def solve(self, target: float, rounds: int) -> float:
        return noise_for(target, self.plan.participants / self.plan.clients, rounds, self.delta)

    def bound(self) -> float:
        return self.clip if self.quantile is None else float(self.state["clip"])

    def select(self, round: Round, inner: Inner) -> Selection:
        selection = inner.select(round)
        if not round.poisson and round.participants < round.clients:
            remedy = "set participation_mode to poisson, or participation to 1"
            count = f"{round.participants} of {round.clients}"
            raise InvalidValue(f"private: {remedy}, not {count} clients in every round")
        if selection.clients != uniform(round) or selection.weights is not None:
            reason = "selects clients by its own rule, which epsilon does not count"
            raise InvalidValue(f"private: {self.method} {reason}")
        return selection

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        clip = self.bound()
        updates, lengths = clipped(replies["model"] - replies.sent("model"), clip)
        below = (lengths <= clip).double().sum(0, keepdim=True) - len(replies) / 2
        total = {"update": updates.double().sum(0), "below": below}
        return Aggregate({}, total, len(replies), len(replies))

    def release(self, round: Round, aggregate: Aggregate) -> Replies:
        assert aggregate.exchange is not None, "the pipeline sets it"
        sent = aggregate.sent("model")[0]
        expected = round.participants
        clip = self.bound()
        nothing = torch.zeros_like(sent, dtype=torch.float64)  # for a round without replies
        multiplier = self.noise_multiplier()
        total = aggregate.total.get("update", nothing)
        if self.quantile is not None:
            below = aggregate.total.get("below", nothing[:1])
            multiplier = self._adapt(round, self.quantile, multiplier, below)
        total = total + multiplier * clip * self._normal(round, "noise", total)
        mean = sent + (total / expected).to(sent)
        self.state["releases"] = torch.full((1,), round.number, dtype=torch.int64)
        exchange = aggregate.exchange.among(tuple(range(expected)))
        slots = torch.arange(expected)
        rows = mean.expand(expected, *mean.shape)
        return Replies({"model": rows}, slots, slots, torch.ones_like(slots), exchange)

    def _adapt(self, round: Round, quantile: float, multiplier: float, below: Tensor) -> float:
        """Move the clip towards the quantile, and return the noise for the sum. The noise of the
        count `below` uses the rest of the budget.
        """
        spread = round.participants / 20
        if multiplier >= 2 * spread:
            least = f"more than {10 * multiplier:g} clients in a round, not {round.participants}"
            raise InvalidValue(f"private: quantile needs {least}")
        below = below + spread * self._normal(round, "clip", below)
        factor = math.exp(
            -self.clip_learning_rate * (0.5 + float(below) / round.participants - quantile)
        )
        self.state["clip"] = self.state["clip"] * factor
        return (multiplier**-2 - (2 * spread) ** -2) ** -0.5 if multiplier else 0.0

    def _normal(self, round: Round, purpose: str, like: Tensor) -> Tensor:
        return normal(like, None if self.plan.remote else round.stream(f"privacy {purpose}"))

    def diagnose(self) -> dict[str, float]:
        return {} if self.quantile is None else {"clip": self.bound()}
