"""A class at every position: the next token of a sequence, and segmentation."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import require_fields
from fedloom.objectives import Metric, Objective, Totals, kind_of, objectives, prediction


class PositionObjective(Objective):
    """A class at every position of a sample: mean cross entropy over the positions with a target
    other than `ignored`.
    """

    positions: ClassVar[str]
    """Name of the count of positions that are not ignored."""

    def __post_init__(self) -> None:
        require_fields(self)

    @property
    @abstractmethod
    def ignored(self) -> int:
        """The target of positions that are ignored in losses and figures."""

    def logits(self, outputs: Any) -> Tensor:
        """Return the logits `[b, classes, ...]` of a model's outputs."""
        return prediction(outputs)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        total = F.cross_entropy(
            self.logits(outputs), targets, ignore_index=self.ignored, reduction="sum"
        )
        return total / (targets != self.ignored).sum().clamp_min(1)

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        logits = self.logits(outputs)
        counts = targets != self.ignored
        axes = tuple(range(1, targets.dim()))
        loss = F.cross_entropy(logits, targets, ignore_index=self.ignored, reduction="none")
        return {
            "loss": loss.double().sum(axes),
            "correct": ((logits.argmax(1) == targets) & counts).sum(axes),
            self.positions: counts.sum(axes),
        }

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("loss", "correct", self.positions), ())

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        positions = totals[self.positions].clamp_min(1)
        return {"accuracy": totals["correct"] / positions, "loss": totals["loss"] / positions}

    def guess(self, outputs: int) -> float:
        return math.log(max(2, outputs))


@objectives.register("sequence")
@dataclass(frozen=True)
class NextToken(PositionObjective):
    """The next token at every position: mean cross entropy, judged by the perplexity.

    The mean is over the tokens of a batch; logits are `[b, tokens, vocabulary]` and targets `[b,
    tokens]` int64. The perplexity is exp(loss); `accuracy` is the share of tokens that have the
    largest logit.

    Args:
        padding: Positions with this target are ignored.
    """

    padding: int = -100
    metric = Metric("perplexity", "Perplexity")
    answer = "token"
    positions = "tokens"

    @property
    def ignored(self) -> int:
        return self.padding

    def logits(self, outputs: Any) -> Tensor:
        return prediction(outputs).transpose(1, 2)

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        figures = super().figures(totals)
        return {"perplexity": figures["loss"].exp(), **figures}

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        return vocabulary or classes

    def require_targets(self, targets: Tensor) -> None:
        if targets.dim() != 2 or targets.dtype != torch.int64:
            raise InvalidValue(
                f"objective 'sequence' needs targets [n, tokens] of int64, not {kind_of(targets)}"
            )


@objectives.register("segmentation")
@dataclass(frozen=True)
class Segmentation(PositionObjective):
    """A class for each pixel: mean cross entropy, judged by the mean IoU.

    The mean is over the pixels of a batch; logits are `[b, classes, h, w]` and targets `[b, h, w]`
    int64. IoU is intersection / union, averaged over the classes that occur or are predicted;
    `accuracy` is the share of correct pixels.

    Args:
        ignore: Pixels with this target are ignored, whatever the model predicts for them.
    """

    ignore: int = 255
    metric = Metric("miou", "Mean IoU", higher_is_better=True, share=True)
    answer = "pixel"
    positions = "pixels"

    @property
    def ignored(self) -> int:
        return self.ignore

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        logits = self.logits(outputs)
        counts = targets != self.ignore
        predicted = logits.argmax(1)
        masks = [
            ((predicted == c) & counts, (targets == c) & counts) for c in range(logits.shape[1])
        ]
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
            raise InvalidValue(
                f"objective 'segmentation' needs targets [n, h, w] of int64, not {kind_of(targets)}"
            )
