"""Multilabel classification: any number of classes for each sample."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.common.errors import InvalidValue
from fedloom.objectives import Metric, Objective, Totals, kind_of, objectives, prediction


@objectives.register("multilabel")
@dataclass(frozen=True)
class Multilabel(Objective):
    """Any number of classes for each sample: mean binary cross entropy, judged by F1.

    Logits and targets are `[b, classes]`; targets are 0 or 1. A class is predicted if its logit is
    above 0. F1 = 2 tp / (2 tp + fp + fn). Recorded are `f1`, over all decisions; `f1_macro`, the
    mean over the classes that occur or are predicted; and `exact`, the share of samples with all
    classes correct.
    """

    metric = Metric("f1", "F1 (micro)", higher_is_better=True, share=True)
    answer = "classes"

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        logits = prediction(outputs)
        return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        logits = prediction(outputs)
        occurring = targets > 0.5
        predicted = logits > 0
        loss = F.binary_cross_entropy_with_logits(
            logits, targets.to(logits.dtype), reduction="none"
        )
        return {
            "loss": loss.double().mean(1),
            "exact": (predicted == occurring).all(1),
            "right": predicted & occurring,
            "predicted": predicted,
            "occurring": occurring,
        }

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return {
            "loss": (),
            "exact": (),
            **dict.fromkeys(("right", "predicted", "occurring"), (outputs,)),
        }

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        hits = totals["right"]
        decisions = totals["predicted"] + totals["occurring"]
        counts = decisions > 0
        f1 = torch.where(counts, 2 * hits / decisions.clamp_min(1), 0)
        return {
            "f1": 2 * hits.sum(1) / decisions.sum(1).clamp_min(1),
            "f1_macro": f1.sum(1) / counts.sum(1).clamp_min(1),
            "exact": totals["exact"] / totals["samples"],
            "loss": totals["loss"] / totals["samples"],
        }

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        return targets.shape[1]

    def guess(self, outputs: int) -> float:
        return math.log(2)

    def require_targets(self, targets: Tensor) -> None:
        if targets.dim() != 2 or not bool(((targets == 0) | (targets == 1)).all()):
            raise InvalidValue(
                "objective 'multilabel' needs targets [n, classes] of 0 and 1, "
                f"not {kind_of(targets)}: give one column per class"
            )
