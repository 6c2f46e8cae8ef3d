"""Segmentation: a class for each pixel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.config.fields import require_fields
from fedloom.errors import InvalidValue
from fedloom.objectives import Metric, Objective, Totals, kind_of, masked_cross_entropy, objectives, prediction


@objectives.register("segmentation")
@dataclass(frozen=True)
class Segmentation(Objective):
    """A class for each pixel: mean cross entropy, judged by the mean IoU.

    Over the pixels of a batch, of logits `[b, classes, h, w]` and targets `[b, h, w]` int64. IoU is intersection / union, its
    mean is over the classes that occur or are predicted; `accuracy` is the share of pixels that are right.

    Args:
        ignore: Pixels with this target count nowhere, whatever is predicted for them.
    """

    ignore: int = 255
    metric = Metric("miou", "Mean IoU", higher_is_better=True, share=True)

    def __post_init__(self) -> None:
        require_fields(self)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return masked_cross_entropy(prediction(outputs), targets, self.ignore)

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        logits = prediction(outputs)
        counts, predicted = targets != self.ignore, logits.argmax(1)
        loss = F.cross_entropy(logits, targets, ignore_index=self.ignore, reduction="none")
        masks = [((predicted == c) & counts, (targets == c) & counts) for c in range(logits.shape[1])]
        return {
            "loss": loss.double().sum((1, 2)),
            "correct": ((predicted == targets) & counts).sum((1, 2)),
            "pixels": counts.sum((1, 2)),
            "intersection": torch.stack([(a & b).sum((1, 2)) for a, b in masks], 1),
            "union": torch.stack([(a | b).sum((1, 2)) for a, b in masks], 1),
        }

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return {**dict.fromkeys(("loss", "correct", "pixels"), ()), "intersection": (outputs,), "union": (outputs,)}

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        pixels, union = totals["pixels"].clamp_min(1), totals["union"]
        iou = torch.where(union > 0, totals["intersection"] / union.clamp_min(1), 0)
        return {
            "miou": iou.sum(1) / (union > 0).sum(1).clamp_min(1),
            "accuracy": totals["correct"] / pixels,
            "loss": totals["loss"] / pixels,
        }

    def guess(self, outputs: int) -> float:
        return math.log(max(2, outputs))

    def require_targets(self, targets: Tensor) -> None:
        if targets.dim() != 3 or targets.dtype != torch.int64:
            raise InvalidValue(f"objective 'segmentation' needs targets [n, h, w] of int64, not {kind_of(targets)}")
