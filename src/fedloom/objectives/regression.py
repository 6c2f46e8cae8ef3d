"""Regression: one or more numbers for each sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Positive, require_fields
from fedloom.common.randomness import stream
from fedloom.objectives import Metric, Objective, Totals, kind_of, objectives, on_device, prediction

STRATA = 10
"""Number of strata of a regression: groups of equal size, ordered by target. Partitions that are
skewed by label distribute them.
"""

_ROUNDING = 8 * torch.finfo(torch.float64).eps
"""Targets with a standard deviation below this share of their mean are constant: the rest is
rounding.
"""


@objectives.register("regression")
@dataclass(frozen=True)
class Regression(Objective):
    """One or more numbers for each sample: the mean error, judged by the RMSE.

    Outputs and targets are `[b, d]`, or `[b]` for d = 1; all means are over samples and columns.
    Recorded are `rmse`, the root of the mean squared error; `mae`, the mean absolute error; and
    `r2`, 1 minus the squared error divided by the variance of the targets, averaged over columns (0
    for a constant column).

    Args:
        kind: The error: `squared`, (y - t)^2; `absolute`, |y - t|; or `huber`, (y - t)^2 / 2 where
            |y - t| <= `delta`, and `delta` (|y - t| - `delta` / 2) elsewhere.
        delta: Width of the quadratic part of `huber`, greater than 0.
    """

    kind: Literal["squared", "absolute", "huber"] = "squared"
    delta: Positive = 1.0
    metric = Metric("rmse", "RMSE")
    answer = "number"

    def __post_init__(self) -> None:
        require_fields(self)

    def _losses(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of every number and the outputs, `[b, d]` each."""
        values = prediction(outputs)
        if values.dim() == 1:
            values = values.unsqueeze(1)
        targets = _columns(targets).to(values.dtype)
        if values.shape != targets.shape:
            raise InvalidValue(
                f"the model returned {list(values.shape)}, but the targets are "
                f"{list(targets.shape)}: both must have the same shape"
            )
        if self.kind == "huber":
            return F.huber_loss(values, targets, reduction="none", delta=self.delta), values
        function = F.mse_loss if self.kind == "squared" else F.l1_loss
        return function(values, targets, reduction="none"), values

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._losses(outputs, targets)[0].mean()

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        loss, values = (tensor.double() for tensor in self._losses(outputs, targets))
        targets = _columns(targets).double()
        error = values - targets
        return {
            "loss": loss.mean(1),
            "absolute": error.abs().mean(1),
            "squared": error.square(),
            "target": targets,
            "deviation": torch.zeros_like(targets),
        }

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return {
            "loss": (),
            "absolute": (),
            **dict.fromkeys(("squared", "target", "deviation"), (outputs,)),
        }

    def add_up(
        self, counts: Totals, total: Callable[[Tensor], Tensor], owner: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Sum counts. A second pass sums squared deviations, since sums of squares would cancel."""
        totals = super().add_up(counts, total, owner)
        samples = counts.get("samples", torch.ones_like(counts["loss"])).unsqueeze(1)
        size = total(samples).clamp_min(1)
        mean = totals["target"] / size
        offset = counts["target"] / samples.clamp_min(1) - (
            mean if owner is None else mean[owner.to(mean.device)]
        )
        remainder = total(samples * offset)  # rounding error of the mean
        totals["target"] = totals["target"] + remainder
        squares = total(samples * offset.square()) - remainder.square() / size
        totals["deviation"] = totals["deviation"] + squares.clamp_min(0)
        return totals

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        samples = totals["samples"].unsqueeze(1)
        squared = totals["squared"] / samples
        variance = totals["deviation"] / samples
        varies = variance > (_ROUNDING * totals["target"] / samples).square()
        return {
            "rmse": squared.mean(1).sqrt(),
            "mae": totals["absolute"] / totals["samples"],
            "r2": torch.where(varies, 1 - squared / variance, 0).mean(1),
            "loss": totals["loss"] / totals["samples"],
        }

    def require_totals(self, totals: Totals) -> None:
        super().require_totals(totals)
        for name in ("loss", "absolute", "squared", "deviation"):
            if (totals[name] < 0).any():
                raise InvalidValue(f"{name} must be at least 0, got {float(totals[name].min()):g}")

    def require_targets(self, targets: Tensor) -> None:
        if targets.dim() not in (1, 2) or not targets.is_floating_point():
            raise InvalidValue(
                "objective 'regression' needs targets [n] or [n, d] of floats, "
                f"not {kind_of(targets)}: "
                "give labels.astype('float32'), or set kind=regression in table(...)"
            )
        if not torch.isfinite(targets).all():
            raise InvalidValue(
                "objective 'regression': a target is NaN or infinite. Remove or replace it"
            )

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        return 1 if targets.dim() == 1 else targets.shape[1]

    def strata(self, targets: Tensor) -> Tensor:
        values = _columns(targets)[:, 0]
        # Equal targets are in random order, so that strata do not follow the order of the rows.
        shuffled = torch.randperm(len(values), generator=stream(0, "equal targets"))
        shuffled = shuffled.to(values.device)
        rank = shuffled[values[shuffled].argsort(stable=True)].argsort()
        return rank * STRATA // max(1, len(rank))


@dataclass(frozen=True)
class Standardised(Regression):
    """A regression on standardised targets, (t - `mean`) / `deviation`. All figures but the loss
    are in the units of the data.
    """

    mean: Sequence[float] = (0.0,)
    deviation: Sequence[float] = (1.0,)

    def in_units(self, values: Tensor) -> Tensor:
        mean, deviation = (
            on_device(tuple(x), values.device, values.dtype) for x in (self.mean, self.deviation)
        )
        return values * deviation + mean

    def standardised(self, targets: Tensor) -> Tensor:
        """Return targets in the units of the data, `[n]` or `[n, d]`, as training uses them."""
        mean, deviation = (
            on_device(tuple(x), targets.device, torch.float64) for x in (self.mean, self.deviation)
        )
        return ((targets.double() - mean) / deviation).to(targets.dtype)

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        values = self.in_units(_columns(prediction(outputs)).double())
        in_units = super().statistics(values, self.in_units(_columns(targets).double()))
        return {**in_units, "loss": self._losses(outputs, targets)[0].double().mean(1)}


def _columns(targets: Tensor) -> Tensor:
    return targets.unsqueeze(1) if targets.dim() == 1 else targets
