import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Plan, Replies
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, Positive
from fedloom.common.round import Round
from fedloom.flat.population import squared_distances
from fedloom.parts.hooks import Inner, Part


@algorithms.register("robust")
class Robust(Part):
    """Robust aggregation around any method that averages: an estimate of the mean replaces the
    clients' replies.

    Of K models x_1 to x_K at most f = ceil(`malicious` K) are assumed to be malicious. The same
    rule applies to other uploaded tensors (SCAFFOLD's variate); Krum chooses the same clients for
    them. All clients have the same weight, independent of the numbers of samples that they report.
    If honest clients differ much, unusual honest updates are lost with malicious ones. Methods that
    need each reply (FedMR, FedGen, methods with a model for each client) are refused. The median
    and the trimmed mean do not depend on the client of each layer, so `secure(robust(fedavg,
    rule=median))` works.
    Source: Yin et al. 2018 (median, trimmed mean); Blanchard et al. 2017 (Krum); Sun et al. 2019
    (norm clipping); Karimireddy et al. 2021, equation 3 (centred clipping).
    Use it over real sites that may be faulty or hostile.

    Args:
        rule: `median` of each coordinate; `trimmed_mean`, the mean of each coordinate without the f
            largest and the f smallest values; `krum`, the model nearest to others, argmin_k of the
            sum of its K - f - 2 smallest |x_k - x_j|^2; `multi_krum`, the mean of the K - f models
            with the lowest such sums; `clipping`, c + mean_k (x_k - c) min(1, r / |x_k - c|) around
            the received model c.
        malicious: Largest share of malicious clients.
        radius: r of clipping; none is the median length of the round's updates.
        steps: Repetitions of clipping around the last estimate (centred clipping).
    """

    rule: Literal["median", "trimmed_mean", "krum", "multi_krum", "clipping"] = "trimmed_mean"
    malicious: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    radius: Positive | None = None
    steps: Count = 1

    requires: ClassVar[tuple[str, ...]] = ("averages",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule != "clipping" and (self.radius is not None or self.steps != 1):
            raise InvalidValue(
                f"robust: radius and steps are only for rule=clipping, not for {self.rule}"
            )

    @property
    def facts(self) -> Facts:
        return Facts(anonymous=self.rule in ("median", "trimmed_mean"))

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state["left_out"] = torch.zeros(1, dtype=torch.int64)
        awaited = plan.participants if plan.awaited is None else plan.awaited
        if awaited < (least := self.least(awaited)):
            threat = (
                f"rule={self.rule} against {self.expected_malicious(awaited)} malicious clients"
            )
            raise InvalidValue(
                f"robust: {threat} needs at least {least} replies in a round, not {awaited}"
            )

    def expected_malicious(self, count: int) -> int:
        """Return the number of replies out of `count` that are assumed to be malicious."""
        return math.ceil(self.malicious * count - 1e-9)

    def least(self, count: int) -> int:
        """Return the smallest number of replies that can outvote the malicious ones.

        Args:
            count: Number of replies from which the malicious ones are computed.
        """
        return 2 * self.expected_malicious(count) + (3 if "krum" in self.rule else 1)

    def rewrite(self, round: Round, replies: Replies) -> Replies | None:
        if len(replies) < self.least(len(replies)):
            self.state["left_out"] = self.state["left_out"] + 1
            return None
        models = replies["model"]
        sent = replies.sent("model")
        center = sent.mean(0)
        if len(sent) > 1:  # updates are relative to the model that each client received
            models = models - sent + center
        chosen = None
        matrices = {}
        if "krum" in self.rule:
            malicious = self.expected_malicious(len(models))
            chosen = krum(models, malicious, 1 if self.rule == "krum" else len(models) - malicious)
        for name, matrix in replies.matrices.items():
            rows = models if name == "model" else replies[name]
            flat = rows.reshape(len(rows), -1).to(models.dtype)
            # Other tensors than the model are differences or counts, so their centre is 0.
            origin = center.to(flat) if name == "model" else torch.zeros_like(flat[0])
            estimate = self.estimate(flat, origin) if chosen is None else flat[chosen].mean(0)
            matrices[name] = estimate.to(rows.dtype).reshape(rows.shape[1:]).expand(matrix.shape)
        return replies.with_matrices(matrices)

    def integers(self, rows: Tensor, current: Tensor) -> Tensor:
        """Return the median of the clients' counters, which a minority cannot change much, or
        `current` if there are too few replies.
        """
        enough = len(rows) >= self.least(len(rows))
        return (
            torch.maximum(current, rows.sort(0).values[(len(rows) - 1) // 2]) if enough else current
        )

    def diagnose(self) -> dict[str, float]:
        left_out = float(self.state["left_out"])
        return {"rounds_left_out": left_out} if left_out else {}

    def estimate(self, rows: Tensor, center: Tensor) -> Tensor:
        """Return an estimate of the mean.

        Args:
            rows: Replies, `[K, P]`.
            center: Centre of clipping, `[P]`.

        Returns:
            The estimate, `[P]`.
        """
        if self.rule == "median":
            return coordinate_median(rows)
        if self.rule == "trimmed_mean":
            return trimmed_mean(rows, self.expected_malicious(len(rows)))
        return centered_clipping(rows, center, self.radius, self.steps)


def coordinate_median(rows: Tensor) -> Tensor:
    """Return the median of each coordinate; for an even number of rows, the mean of the two middle
    values.

    Source: Yin et al. 2018.
    """
    return trimmed_mean(rows, (len(rows) - 1) // 2)


def trimmed_mean(rows: Tensor, trimmed: int) -> Tensor:
    """Return the mean of each coordinate without its `trimmed` largest and smallest values.

    Args:
        rows: Replies, `[K, P]`.
        trimmed: Number of values that are removed at each end, less than K / 2.

    Returns:
        The mean of the others, `[P]`.

    Source: Yin et al. 2018, definition 2.
    """
    return rows.sort(0).values[trimmed : len(rows) - trimmed].mean(0)


def krum(rows: Tensor, malicious: int, chosen: int = 1) -> Tensor:
    """Return the indices of the rows nearest to others, by Krum or multi-Krum.

    Args:
        rows: Models, `[K, P]`.
        malicious: Number of malicious rows.
        chosen: Number of returned rows; more than one is multi-Krum.

    Returns:
        Indices, `[chosen]`, of the rows with the lowest sums of their K - `malicious` - 2 smallest
        squared distances.

    Source: Blanchard et al. 2017, "Machine learning with adversaries".
    """
    distances = squared_distances(rows).double().fill_diagonal_(torch.inf)
    nearest = distances.sort(1).values[:, : max(1, len(rows) - malicious - 2)]
    return nearest.sum(1).argsort(stable=True)[:chosen]


def centered_clipping(
    rows: Tensor, center: Tensor, radius: float | None = None, steps: int = 1
) -> Tensor:
    """Return c after `steps` times c <- c + mean_k (x_k - c) min(1, r / |x_k - c|).

    Args:
        rows: Models x_k, `[K, P]`.
        center: Initial c, `[P]`.
        radius: r; None is the median of |x_k - c|.
        steps: Number of steps. One step is the norm clipping of Sun et al. 2019, "Can you really
            backdoor federated learning?".

    Returns:
        c, `[P]`.

    Source: Karimireddy et al. 2021, "Learning from history for Byzantine robust optimization",
    equation 3.
    """
    for _ in range(steps):
        updates = rows - center
        lengths = updates.norm(dim=1)
        longest = lengths.quantile(0.5) if radius is None else lengths.new_tensor(radius)
        share = (longest / lengths.clamp_min(torch.finfo(rows.dtype).tiny)).clamp_max(1)
        center = center + (share @ updates) / len(rows)
    return center
