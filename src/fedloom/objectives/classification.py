"""Classification: one class for each sample."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import BelowOne, Count, NonNegative, require_fields
from fedloom.common.plugins import found_at
from fedloom.objectives import (
    ACCURACY,
    Objective,
    Totals,
    kind_of,
    objectives,
    on_device,
    prediction,
)
from fedloom.objectives.custom import Custom


@objectives.register("classification")
@dataclass(frozen=True)
class Classification(Objective):
    """One class for each sample: mean cross entropy, judged by the accuracy.

    The model returns logits `[b, classes]`; labels are `[b]` int64.

    Args:
        label_smoothing: Label smoothing of PyTorch's `cross_entropy`, in [0, 1).
        class_weights: One weight of at least 0 for each class, as in `cross_entropy`: the weighted
            sum over a batch is divided by the sum of its weights. By default all weights are 1.
        top_k: Also record the share of samples with their class among the k largest logits.
        criterion: A function (outputs, targets) -> losses `[b]`, or its path `'module:function'`,
            in place of the cross entropy.
    """

    label_smoothing: BelowOne = 0.0
    class_weights: Sequence[NonNegative] = ()
    top_k: Count | None = None
    criterion: str | Callable[..., Any] | None = None
    metric = ACCURACY
    classes = True
    answer = "class"

    def __post_init__(self) -> None:
        require_fields(self)
        object.__setattr__(self, "class_weights", tuple(self.class_weights))
        if isinstance(self.criterion, str):
            object.__setattr__(self, "criterion", found_at(self.criterion, "criterion"))
        if self.criterion and (self.label_smoothing or self.class_weights):
            raise InvalidValue(
                "criterion replaces the cross entropy, so label_smoothing and class_weights have "
                "no effect: remove them or criterion"
            )
        if self.class_weights and not sum(self.class_weights):
            raise InvalidValue("class_weights are all 0: at least one must be above 0")

    @property
    def plain_cross_entropy(self) -> bool:
        return not (self.label_smoothing or self.class_weights or self.criterion)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        logits = prediction(outputs)
        if self.plain_cross_entropy:
            # Under `vmap`, `cross_entropy` first imports PyTorch's symbolic shapes, which takes
            # half a second. This expression gives the same bits.
            if is_batchedtensor(logits):
                return -logits.log_softmax(1).gather(1, targets.unsqueeze(1)).mean()
            return F.cross_entropy(logits, targets)
        loss, weights = self._losses(outputs, targets)
        return loss.sum() / weights.sum()

    def _losses(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and weight of each sample, `[b]`, as `cross_entropy` does, but also under
        `vmap`.

        With c classes, class weights w and smoothing e, the loss is (1 - e) w_y (-log p_y) + e / c
        sum_k w_k (-log p_k) and the weight is w_y.
        """
        if callable(self.criterion):
            losses = Custom(self.criterion).sample_losses(outputs, targets)
            return losses, torch.ones_like(losses)
        logits = prediction(outputs)
        surprise = -logits.log_softmax(1)
        classes = logits.shape[1]
        if self.class_weights and len(self.class_weights) != classes:
            raise InvalidValue(
                f"class_weights has {len(self.class_weights)} numbers, but the model has {classes} "
                "outputs: give one weight for each"
            )
        weights = on_device(
            tuple(self.class_weights) or (1.0,) * classes, logits.device, logits.dtype
        )
        weight = weights[targets]
        unsmoothed = surprise.gather(1, targets.unsqueeze(1)).squeeze(1) * weight
        return (1 - self.label_smoothing) * unsmoothed + self.label_smoothing * (
            surprise * weights
        ).mean(1), weight

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        logits = prediction(outputs)
        counts = {"correct": logits.argmax(1) == targets}
        if self.plain_cross_entropy:
            counts["loss"] = F.cross_entropy(logits, targets, reduction="none")
        else:
            counts["loss"], counts["weight"] = self._losses(outputs, targets)
        if self.top_k is not None:
            largest = logits.topk(min(self.top_k, logits.shape[1]), dim=1).indices
            counts["among"] = (largest == targets.unsqueeze(1)).any(1)
        return counts

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        weight = () if self.plain_cross_entropy else ("weight",)
        return dict.fromkeys(("correct", "loss", *weight, *(("among",) if self.top_k else ())), ())

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        figures = {
            "accuracy": totals["correct"] / totals["samples"],
            "loss": totals["loss"] / totals.get("weight", totals["samples"]),
        }
        return (
            figures
            if self.top_k is None
            else {**figures, f"top_{self.top_k}": totals["among"] / totals["samples"]}
        )

    def require_targets(self, targets: Tensor) -> None:
        if targets.dim() != 1 or targets.dtype != torch.int64:
            remedy = "give integers or text, or set objective='regression'"
            if targets.dim() == 2 and targets.shape[1] == 1:
                remedy = "give labels[:, 0]"
            elif targets.dim() == 2:
                remedy = (
                    "for one column per class give labels.argmax(1), or set objective='multilabel'"
                )
            raise InvalidValue(
                "objective 'classification' needs labels [n] of int64, "
                f"not {kind_of(targets)}: {remedy}"
            )
        highest = int(targets.max()) if self.class_weights and len(targets) else -1
        if highest >= len(self.class_weights):
            raise InvalidValue(
                f"class_weights has {len(self.class_weights)} numbers, but label {highest} occurs: "
                "give one weight for each class"
            )

    def guess(self, outputs: int) -> float:
        return math.inf if self.criterion else math.log(max(2, outputs))

    def require_totals(self, totals: Totals) -> None:
        super().require_totals(totals)
        correct, loss, samples = (float(totals[name]) for name in ("correct", "loss", "samples"))
        if not 0 <= correct <= samples or correct != int(correct):
            raise InvalidValue(f"{correct:g} of {samples:g} samples cannot be correct")
        if loss < 0 and not self.criterion:
            raise InvalidValue(f"the loss is {loss:g}, but a cross entropy is at least 0")

    def strata(self, targets: Tensor) -> Tensor:
        return targets


CLASSIFICATION = Classification()
"""The objective of data sets that do not name one."""
