"""Numbers for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.config.fields import Positive, require_fields
from fedloom.errors import InvalidValue
from fedloom.objectives import Metric, Objective, Totals, kind_of, objectives, prediction

STRATA = 10
"""Groups of equally many samples, by the size of their target, that a partition skewed by label shares out."""


@objectives.register("regression")
@dataclass(frozen=True)
class Regression(Objective):
    """Numbers for each sample: the mean error, judged by the RMSE.

    Over samples and columns, of outputs and targets `[b, d]` (or `[b]`, d = 1). `kind` of error: `squared`, (y - t)^2;
    `absolute`, |y - t|; or `huber`: (y - t)^2 / 2 where |y - t| <= `delta`, and `delta` (|y - t| - `delta` / 2) beyond. Recorded:
    the root of the mean squared error, `rmse`; the mean absolute error, `mae`; and `r2`, 1 minus the squared error over the
    variance of the targets, the mean over columns (0 where they do not vary).
    """

    kind: Literal["squared", "absolute", "huber"] = "squared"
    delta: Positive = 1.0
    metric = Metric("rmse", "RMSE")

    def __post_init__(self) -> None:
        require_fields(self)

    def _each(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of every number, `[b, d]`, the outputs and the targets, in one shape."""
        found = prediction(outputs)
        if found.dim() == 1:
            found = found.unsqueeze(1)
        wanted = (targets.unsqueeze(1) if targets.dim() == 1 else targets).to(found.dtype)
        if found.shape != wanted.shape:
            raise InvalidValue(f"the model returns {list(found.shape)} where the targets are {list(wanted.shape)}")
        if self.kind == "huber":
            return F.huber_loss(found, wanted, reduction="none", delta=self.delta), found, wanted
        function = F.mse_loss if self.kind == "squared" else F.l1_loss
        return function(found, wanted, reduction="none"), found, wanted

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._each(outputs, targets)[0].mean()

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        loss, found, wanted = (tensor.double() for tensor in self._each(outputs, targets))
        error = found - wanted
        return {
            "loss": loss.mean(1),
            "absolute": error.abs().mean(1),
            "squared": error.square(),
            "target": wanted,
            "target_squared": wanted.square(),
        }

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return {"loss": (), "absolute": (), **dict.fromkeys(("squared", "target", "target_squared"), (outputs,))}

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        samples = totals["samples"]
        squared = totals["squared"] / samples.unsqueeze(1)
        variance = totals["target_squared"] / samples.unsqueeze(1) - (totals["target"] / samples.unsqueeze(1)).square()
        return {
            "rmse": squared.mean(1).sqrt(),
            "mae": totals["absolute"] / samples,
            "r2": torch.where(variance > 0, 1 - squared / variance, 0).mean(1),
            "loss": totals["loss"] / samples,
        }

    def require_targets(self, targets: Tensor) -> None:
        if targets.dim() not in (1, 2) or not targets.is_floating_point():
            raise InvalidValue(
                f"objective 'regression' needs targets [n] or [n, d] of floats, not {kind_of(targets)}: "
                "give labels.astype('float32')"
            )
        if not torch.isfinite(targets).all():
            raise InvalidValue("objective 'regression': a target is NaN or infinite")

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        return 1 if targets.dim() == 1 else targets.shape[1]

    def strata(self, targets: Tensor) -> Tensor:
        first = targets if targets.dim() == 1 else targets[:, 0]
        rank = first.argsort(stable=True).argsort()
        return rank * STRATA // max(1, len(rank))
