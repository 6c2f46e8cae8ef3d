"""Segmentation: a class for each pixel."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import InvalidValue
from fedloom.objectives import Metric, Totals, kind_of, objectives
from fedloom.objectives.sequence import PositionObjective


@objectives.register("segmentation")
@dataclass(frozen=True)
class Segmentation(PositionObjective):
    """A class for each pixel: mean cross entropy, judged by the mean IoU.

    Over the pixels of a batch, of logits `[b, classes, h, w]` and targets `[b, h, w]` int64. IoU is intersection / union, its
    mean is over the classes that occur or are predicted; `accuracy` is the share of pixels that are right.

    Args:
        ignore: Pixels with this target count nowhere, whatever is predicted for them.
    """

    ignore: int = 255
    metric = Metric("miou", "Mean IoU", higher_is_better=True, share=True)
    answer = "pixel"
    positions = "pixels"

    @property
    def ignored(self) -> int:
        return self.ignore

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        logits, counts = self.logits(outputs), targets != self.ignore
        predicted = logits.argmax(1)
        masks = [((predicted == c) & counts, (targets == c) & counts) for c in range(logits.shape[1])]
        return {
            **super().statistics(outputs, targets),
            "intersection": torch.stack([(a & b).sum((1, 2)) for a, b in masks], 1),
            "union": torch.stack([(a | b).sum((1, 2)) for a, b in masks], 1),
        }

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(outputs), "intersection": (outputs,), "union": (outputs,)}

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        union = totals["union"]
        iou = torch.where(union > 0, totals["intersection"] / union.clamp_min(1), 0)
        return {"miou": iou.sum(1) / (union > 0).sum(1).clamp_min(1), **super().figures(totals)}

    def require_targets(self, targets: Tensor) -> None:
        if targets.dim() != 3 or targets.dtype != torch.int64:
            raise InvalidValue(f"objective 'segmentation' needs targets [n, h, w] of int64, not {kind_of(targets)}")
