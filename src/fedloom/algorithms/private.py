"""Differential privacy of whole clients: noise on the server's releases (`private`) or on uploads (`local_private`)."""

import math
import secrets
from abc import abstractmethod
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm import (
    AggregatedReplies,
    Algorithm,
    Exchange,
    Message,
    Plan,
    Replies,
    Selection,
    Wrapper,
    algorithms,
    name_of,
    require_one_model,
    source_of,
    uniform,
)
from fedloom.algorithms.accounting import epsilon, noise_for
from fedloom.algorithms.compression import Compressed
from fedloom.algorithms.secure_recombination import Secure
from fedloom.config.fields import NonNegative, Positive
from fedloom.errors import InvalidValue
from fedloom.local.cohort import Cohort
from fedloom.round import Round

OpenShare = Annotated[float, Field(gt=0, lt=1)]


class Accounted(Wrapper):
    """Base of wrappers whose releases cost privacy.

    Each release is (epsilon, `delta`)-private; epsilon grows with the releases, and every round records it. Checkpoints store
    it and, over real sites, a ledger beside them (`fedloom.state.released`).

    Args:
        clip: C, the largest length of an update.
        noise: Standard deviation of the noise in units of C; none chooses it before round 1 for `target_epsilon` after all
            rounds.
        delta: Probability of a larger loss, well below 1 over the number of clients.
        target_epsilon: Largest epsilon; with `noise` the run ends before the round that would exceed it.
    """

    clip: Positive = 1.0
    noise: NonNegative | None = None
    delta: OpenShare = 1e-5
    target_epsilon: Positive | None = None

    earlier = 0.0  # sum of 1 / noise^2 of what statistics of the sites' columns released of each row

    def __post_init__(self) -> None:
        super().__post_init__()
        self._solved, name = self.noise, name_of(self)
        if self.noise is None and self.target_epsilon is None:
            raise InvalidValue(f"{name}: give noise, such as 0.8 (times clip), or target_epsilon, to choose it")
        for inner in self.method.nested():
            if isinstance(inner, Compressed):
                raise InvalidValue(f"{name}: put {name_of(inner)} around {name}")
            if isinstance(inner, Accounted):
                raise InvalidValue(f"{name}: {name_of(inner)} counts an epsilon of its own: take one of them")

    @property
    def needs_total_rounds(self) -> bool:
        return self.noise is None or super().needs_total_rounds

    @property
    def releases_once(self) -> bool:
        return self.plan.remote or super().releases_once

    def bound(self) -> float:
        """Return the length of the longest update."""
        return self.clip

    @abstractmethod
    def cost(self, extra: int = 0) -> float:
        """Return epsilon so far, or after `extra` more releases."""

    @abstractmethod
    def solve(self, target: float, rounds: int) -> float:
        """Return the noise with which `rounds` rounds cost `target`."""

    def noise_multiplier(self) -> float:
        """Return the noise in units of the clip."""
        if self._solved is None:
            assert self.target_epsilon is not None, "`__post_init__` raises"
            self._solved = self.solve(self.target_epsilon, self.plan.rounds)
        return self._solved

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["releases"] = torch.zeros(1, dtype=torch.int64)
        name, opening = name_of(self), plan.opening()
        if extra := sorted(self.method.expects(opening).keys() - {"model"}):
            raise InvalidValue(f"{name}: clients of {self.method} upload {extra[0]!r} too, which would leak")
        require_one_model(name, self.method, opening)
        if plan.layout.integers:
            raise InvalidValue(f"{name}: the model counts its batches (batch norm), which would leak: use group norm")

    @property
    def spent(self) -> bool:
        # Over real sites a round that is repeated costs again, so that the chosen noise may not last for all rounds.
        limit = None if self.noise is None and not self.plan.remote else self.target_epsilon
        return (limit is not None and self.cost(extra=1) > limit) or super().spent

    def counted(self, selection: Selection) -> tuple[int, ...] | None:
        """Return the clients whom a round costs a release each; None if it is one release for all."""
        return None

    def account(self) -> dict[str, float]:
        return super().account() | {"epsilon": self.cost()}


@algorithms.register("private")
class Private(Accounted):
    """Central differential privacy of clients, over any method that averages: clipped updates, a noisy sum, a fixed divisor.

    With u_k = w_k - w the update of client k, C = `clip`, z = `noise` and q N the expected participants, every reply becomes

        w + (sum_k u_k min(1, C / |u_k|) + z C n) / (q N),    n standard normal

    so that the models do not reveal whether a client took part. All clients count alike, whatever their samples. Each must
    take part independently with probability q (`participation_mode = "poisson"`), or all in every round; empty rounds add noise.

    Noise comes from the run's streams in a simulation, and from the system's cryptographic generator over real sites. The
    server sees updates without noise, and is trusted. Losses and accuracies that it records are not private, and neither are
    the participants of each round: publishing them gives up the amplification by sampling, and epsilon is then that of
    participation 1.
    Source: McMahan et al. 2018, "Learning differentially private recurrent language models", algorithm 1; Andrew et al. 2021,
    "Differentially private learning with adaptive clipping", algorithm 1.
    Use it when the model is given to others, and hundreds of clients can take part in a round.

    Args:
        quantile: g, the share of updates that C should not clip: with b_k = 1 where |u_k| <= C, else 0, each round ends with
            C <- C exp(-`clip_learning_rate` (b - g)), b = 1/2 + (sum_k (b_k - 1/2) + s n) / (q N), s = q N / 20. The noise of
            the sum is raised to (z^-2 - (2 s)^-2)^(-1/2), so that both together cost as much as z. None keeps C.
        clip_learning_rate: Step size of C (Andrew et al.: 0.2).
    """

    quantile: OpenShare | None = None
    clip_learning_rate: Positive = 0.2

    needs_every_reply: ClassVar[bool] = True
    updates_without_replies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for inner in self.method.nested():
            if isinstance(inner, Secure):
                raise InvalidValue(f"private: in {inner} an upload holds layers of several clients, unclipped")
            if not inner.averages:
                remedy = f"local_private({self.method}) has each client add noise"
                raise InvalidValue(f"private: {inner} passes on what single clients sent, not a sum: {remedy}")

    def require_inside(self, outer: Algorithm) -> None:
        if not isinstance(outer, Compressed | Accounted):
            name = name_of(outer)
            raise InvalidValue(f"private: {name} would change what is summed or released: put private around {name}")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        if self.quantile is not None:
            self.state["clip"] = torch.tensor([self.clip], dtype=torch.float64)
        if (inner := source_of(self.method, "one_model_each")) is not None:
            remedy = f"local_private({self.method}) has each client add noise"
            raise InvalidValue(f"private: one client less changes what {inner} sends to others: {remedy}")
        self.select(plan.opening())

    def cost(self, extra: int = 0) -> float:
        share = self.plan.participants / self.plan.clients
        return epsilon(self.noise_multiplier(), share, int(self.state["releases"]) + extra, self.delta)

    def solve(self, target: float, rounds: int) -> float:
        return noise_for(target, self.plan.participants / self.plan.clients, rounds, self.delta)

    def select(self, round: Round) -> Selection:
        selection = self.method.select(round)
        if not round.poisson and round.participants < round.clients:
            remedy = "set participation_mode to poisson, or participation to 1"
            raise InvalidValue(f"private: {remedy}, not {round.participants} of {round.clients} clients in every round")
        if selection.clients != uniform(round) or selection.weights is not None:
            raise InvalidValue(f"private: {self.method} chooses its clients itself, which epsilon leaves out")
        self.cost(extra=1)  # chooses the noise and needs the library: an error shows before training
        return selection

    @property
    def folds(self) -> bool:
        return True

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        clip = self.bound()
        updates, lengths = clipped(replies["model"] - replies.sent("model"), clip)
        below = (lengths <= clip).double().sum(0, keepdim=True) - len(replies) / 2
        return AggregatedReplies({}, {"update": updates.double().sum(0), "below": below}, len(replies), len(replies))

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        sent, expected, clip = aggregate.sent("model")[0], round.participants, self.bound()
        nothing = torch.zeros_like(sent, dtype=torch.float64)  # for a round without replies
        multiplier, total = self.noise_multiplier(), aggregate.total.get("update", nothing)
        if self.quantile is not None:
            multiplier = self._adapt(round, self.quantile, multiplier, aggregate.total.get("below", nothing[:1]))
        total = total + multiplier * clip * self._normal(round, "noise", total)
        mean = sent + (total / expected).to(sent)
        self.state["releases"] = torch.full((1,), round.number, dtype=torch.int64)
        assert aggregate.exchange is not None, "`receive` and the federation give it"
        exchange = aggregate.exchange.within().among(tuple(range(expected)))
        slots, rows = torch.arange(expected), mean.expand(expected, *mean.shape)
        self.method.receive(round, Replies({"model": rows}, slots, slots, torch.ones_like(slots), exchange))

    def _adapt(self, round: Round, quantile: float, multiplier: float, below: Tensor) -> float:
        """Move the clip towards the quantile, and return the noise of the sum that is left beside that of the count `below`."""
        spread = round.participants / 20
        if multiplier >= 2 * spread:
            least = f"more than {10 * multiplier:g} clients in a round, not {round.participants}"
            raise InvalidValue(f"private: quantile needs {least}")
        below = below + spread * self._normal(round, "clip", below)
        factor = math.exp(-self.clip_learning_rate * (0.5 + float(below) / round.participants - quantile))
        self.state["clip"] = self.state["clip"] * factor
        return (multiplier**-2 - (2 * spread) ** -2) ** -0.5 if multiplier else 0.0

    def receive(self, round: Round, replies: Replies) -> None:
        Algorithm.receive(self, round, replies)

    def bound(self) -> float:
        return self.clip if self.quantile is None else float(self.state["clip"])

    def _normal(self, round: Round, purpose: str, like: Tensor) -> Tensor:
        return normal(like, None if self.plan.remote else round.stream(f"privacy {purpose}"))

    def diagnose(self) -> dict[str, float]:
        return self.method.diagnose() | ({} if self.quantile is None else {"clip": self.bound()})


class AccountedByClient(Accounted):
    """Base of wrappers whose clients add the noise: around any method whose clients return an update of the one model sent."""

    def require_inside(self, outer: Algorithm) -> None:
        if not isinstance(outer, Compressed | Accounted) and type(outer).train is not Wrapper.train:
            wrapper, name = name_of(self), name_of(outer)
            raise InvalidValue(f"{wrapper}: {name} works on the clients too: put {wrapper} around {name}")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["releases"] = torch.zeros(plan.clients, dtype=torch.int64)

    def select(self, round: Round) -> Selection:
        self.cost(extra=1)
        return self.method.select(round)

    def counted(self, selection: Selection) -> tuple[int, ...]:
        return selection.clients

    def finish(self, round: Round, exchange: Exchange) -> None:
        super().finish(round, exchange)
        counts = self.state["releases"].clone()
        counts[list(self.counted(exchange.selection))] += 1
        self.state["releases"] = counts


@algorithms.register("local_private")
class LocalPrivate(AccountedByClient):
    """Local differential privacy: every client clips its update and adds noise before the upload, so no server need be trusted.

    With u the update, C = `clip` and z = `noise`, a client uploads w + u min(1, C / |u|) + z C n, n standard normal, and no
    figures of its training. One upload is private for any two data sets of a client: their updates differ by at most 2 C, so
    that it costs as much as noise z / 2. `epsilon` is that of the client that was selected most often, over all its uploads.

    It goes around any method whose clients return an update of the one model that they are sent, FedMR too. The same z costs
    far more accuracy than in `private`: the mean of K models keeps noise z C / K^(1/2) where `private` adds z C / K.
    Source: Kasiviswanathan et al. 2011 (local privacy); Dwork and Roth 2014, appendix A (Gaussian mechanism).
    Use it when the server is not trusted, or when single models are passed on; expect to need very many clients.
    """

    def cost(self, extra: int = 0) -> float:
        return epsilon(self.noise_multiplier() / 2, 1.0, int(self.state["releases"].max()) + extra, self.delta)

    def solve(self, target: float, rounds: int) -> float:
        return 2 * noise_for(target, 1.0, rounds, self.delta)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        reply = self.method.train(cohort, inbox)
        updates, _ = clipped(reply["model"] - inbox["model"], self.bound())
        streams = [None] * len(updates) if self.plan.remote else cohort.stream("privacy noise")
        noise = torch.stack([normal(updates[0], stream) for stream in streams])
        cohort.metrics.clear()  # losses are of the client's data too
        noisy = updates.double() + self.noise_multiplier() * self.bound() * noise
        return {"model": inbox["model"] + noisy.to(updates)}


def clipped(updates: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return each row u of `updates [k, m]` as u min(1, `clip` / |u|), and the lengths |u| `[k]`. A row that is not finite counts
    as zero: refusing it would reveal something of the client's data."""
    shares, lengths = clip_factors(updates, clip)
    scaled = updates.double() * shares.unsqueeze(1)
    return torch.where(lengths.isfinite().unsqueeze(1), scaled, 0).to(updates), lengths


def clip_factors(updates: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return min(1, `clip` / |u|) and |u| of each row u of `updates [k, m]`, `[k]` float64."""
    lengths = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64)
    return (clip / lengths.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1), lengths


def normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal float64 like `like`: by `generator`, or else the system's cryptographic one (Box and Muller)."""
    if generator is not None:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)
    count = like.numel()
    radius, angle = 1 - secret_uniforms(2 * count).reshape(2, count)  # in (0, 1]
    numbers = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    return torch.from_numpy(numbers).reshape(like.shape).to(like.device)


def secret_uniforms(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return `count` numbers in [0, 1) from the system's cryptographic generator."""
    return (np.frombuffer(secrets.token_bytes(8 * count), np.uint64) >> np.uint64(11)) / 2.0**53
