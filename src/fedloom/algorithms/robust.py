"""Robust aggregation: estimates of the clients' mean that a minority of malicious clients cannot move at will."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm import Plan, Replies, Wrapper, algorithms, describe
from fedloom.config.fields import Count, Positive
from fedloom.errors import InvalidValue
from fedloom.flat.population import squared_distances
from fedloom.round import Round


@algorithms.register("robust")
@dataclass
class Robust(Wrapper):
    """Robust aggregation around any method that averages: what clients sent is replaced by an estimate of its mean.

    Of K models x_1 to x_K at most f = ceil(`malicious` K) are taken to be malicious. The `rule` is `median`, the median of
    each coordinate; `trimmed_mean`, of each coordinate the mean without the f largest and the f smallest values; `krum`, the
    model nearest to others, argmin_k of the sum of its K - f - 2 smallest |x_k - x_j|^2; `multi_krum`, the mean of the K - f
    models with the lowest such sums; or `clipping`, c + mean_k (x_k - c) min(1, r / |x_k - c|) around the model c that was sent,
    so that no update counts as longer than r = `radius`, by default the median length of the round's updates. With `steps` > 1
    clipping is repeated around the estimate so far (centred clipping).

    What a method's clients send beside the model (SCAFFOLD's variate) is estimated by the same rule, by Krum from the same
    clients. The inner method receives the estimate in place of every reply. All clients count alike, whatever numbers of samples
    they claim; where honest clients differ much, what is unusual is lost with what is malicious. Methods that need the single
    replies (FedMR, FedGen, those with a model for each client) are refused. The median and the trimmed mean do not depend on
    whose layer is whose, so `secure(robust(fedavg, rule=median))` works.
    Source: Yin et al. 2018 (median, trimmed mean); Blanchard et al. 2017 (Krum); Sun et al. 2019 (norm clipping); Karimireddy et
    al. 2021, equation 3 (centred clipping).
    Use it over real sites that may be faulty or hostile.
    """

    rule: Literal["median", "trimmed_mean", "krum", "multi_krum", "clipping"] = "trimmed_mean"
    malicious: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    radius: Positive | None = None
    steps: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.method.nested():
            if not part.averages:
                hint = f": put {type(part).__name__.lower()} around robust" if part.inner() else ""
                raise InvalidValue(
                    f"robust: {describe(part)} needs the single replies, not an estimate of their mean{hint}"
                )
        if self.rule != "clipping" and (self.radius is not None or self.steps != 1):
            raise InvalidValue(f"robust: radius and steps belong to rule=clipping, not to {self.rule}")

    @property
    def anonymous_replies(self) -> bool:
        return self.rule in ("median", "trimmed_mean")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        malicious = self.expected_malicious(plan.participants)
        least = 2 * malicious + (3 if "krum" in self.rule else 1)
        if plan.participants < least:
            raise InvalidValue(
                f"robust: rule={self.rule} against {malicious} malicious clients needs at least {least} in a round, "
                f"not {plan.participants}: select more, or lower malicious"
            )

    def expected_malicious(self, count: int) -> int:
        """How many of `count` replies are taken to be malicious."""
        return math.ceil(self.malicious * count - 1e-9)

    def receive(self, round: Round, replies: Replies) -> None:
        sent, models = self.method.send(round)["model"][0], replies["model"]
        chosen = self._chosen(models) if "krum" in self.rule else None
        tensors = {}
        for name, rows in replies.tensors.items():
            flat = rows.reshape(len(rows), -1).to(models.dtype)
            # What is sent beside the model is differences or counts.
            center = sent.to(flat) if name == "model" else torch.zeros_like(flat[0])
            estimate = self.estimate(flat, center) if chosen is None else flat[chosen].mean(0)
            tensors[name] = estimate.to(rows.dtype).reshape(rows.shape[1:]).expand(rows.shape)
        self.method.receive(round, replace(replies, tensors=tensors))

    def estimate(self, rows: Tensor, center: Tensor) -> Tensor:
        """The estimate `[P]` of the mean of `rows [K, P]`, coordinate by coordinate or by clipping around `center`."""
        if self.rule == "median":
            return coordinate_median(rows)
        if self.rule == "trimmed_mean":
            return trimmed_mean(rows, min(self.expected_malicious(len(rows)), (len(rows) - 1) // 2))
        return centered_clipping(rows, center, self.radius, self.steps)

    def _chosen(self, models: Tensor) -> Tensor:
        """The clients that Krum takes. When clients drop out, fewer of them are taken to be malicious."""
        count = len(models)
        malicious = min(self.expected_malicious(count), max(0, (count - 3) // 2))
        return krum(models, malicious, 1 if self.rule == "krum" else count - malicious)


def coordinate_median(rows: Tensor) -> Tensor:
    """median_k x_k[i] for every coordinate i; of an even number, the mean of the two in the middle.

    Source: Yin et al. 2018, "Byzantine-robust distributed learning", definition 1.
    """
    return trimmed_mean(rows, (len(rows) - 1) // 2)


def trimmed_mean(rows: Tensor, trimmed: int) -> Tensor:
    """For every coordinate, the mean of the values that remain without the `trimmed` largest and the `trimmed` smallest.

    Source: Yin et al. 2018, definition 2.
    """
    return rows.sort(0).values[trimmed : len(rows) - trimmed].mean(0)


def krum(rows: Tensor, malicious: int, chosen: int = 1) -> Tensor:
    """The `chosen` rows with the lowest scores: the sum of a row's K - f - 2 smallest squared distances to others, f malicious.

    Source: Blanchard et al. 2017, "Machine learning with adversaries"; with several chosen, multi-Krum.
    """
    distances = squared_distances(rows).double().fill_diagonal_(torch.inf)
    nearest = distances.sort(1).values[:, : max(1, len(rows) - malicious - 2)]
    return nearest.sum(1).argsort(stable=True)[:chosen]


def centered_clipping(rows: Tensor, center: Tensor, radius: float | None = None, steps: int = 1) -> Tensor:
    """`steps` times c <- c + mean_k (x_k - c) min(1, r / |x_k - c|); without a `radius` r is the median of |x_k - c|.

    Source: Karimireddy et al. 2021, "Learning from history for Byzantine robust optimization", equation 3; one step is the norm
    clipping of Sun et al. 2019, "Can you really backdoor federated learning?".
    """
    for _ in range(steps):
        updates = rows - center
        lengths = updates.norm(dim=1)
        longest = lengths.quantile(0.5) if radius is None else lengths.new_tensor(radius)
        share = (longest / lengths.clamp_min(torch.finfo(rows.dtype).tiny)).clamp_max(1)
        center = center + (share @ updates) / len(rows)
    return center
