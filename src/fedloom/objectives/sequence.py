"""Sequences: the next token at every position."""

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


@objectives.register("sequence")
@dataclass(frozen=True)
class NextToken(Objective):
    """The next token at every position: mean cross entropy, judged by the perplexity.

    Over the tokens of a batch, of logits `[b, tokens, vocabulary]` and targets `[b, tokens]` int64. The perplexity is exp(loss);
    `accuracy` is the share of tokens whose logit is largest.

    Args:
        padding: Targets equal to it count nowhere.
    """

    padding: int = -100
    metric = Metric("perplexity", "Perplexity")

    def __post_init__(self) -> None:
        require_fields(self)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return masked_cross_entropy(prediction(outputs).transpose(1, 2), targets, self.padding)

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        logits, counts = prediction(outputs), targets != self.padding
        loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=self.padding, reduction="none")
        return {
            "loss": loss.double().sum(1),
            "correct": ((logits.argmax(2) == targets) & counts).sum(1),
            "tokens": counts.sum(1),
        }

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("loss", "correct", "tokens"), ())

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        tokens = totals["tokens"].clamp_min(1)
        loss = totals["loss"] / tokens
        return {"perplexity": loss.exp(), "accuracy": totals["correct"] / tokens, "loss": loss}

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        return vocabulary or classes

    def guess(self, outputs: int) -> float:
        return math.log(max(2, outputs))

    def require_targets(self, targets: Tensor) -> None:
        if targets.dim() != 2 or targets.dtype != torch.int64:
            raise InvalidValue(f"objective 'sequence' needs targets [n, tokens] of int64, not {kind_of(targets)}")
