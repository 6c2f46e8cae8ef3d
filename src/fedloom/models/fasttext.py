"""The text model of FedALA's experiments."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.config.fields import Count
from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.shapes import vocabulary


class FastText(nn.Module):
    """Tokens `[n, length]` int64 `-> [n, classes]`: the mean embedding over all positions, `hidden`, `head`, no activation.

    Token 0 is padding: its embedding is zero and receives no gradient.
    """

    def __init__(self, tokens: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width, padding_idx=0)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.embedding(x).mean(1)))
        return logits


@models.register("fasttext")
def fasttext(spec: DataSpec, *, width: Count = 32) -> nn.Module:
    """FedALA's fastText: mean of 32-wide embeddings, two linear layers (3,157,508 parameters on AG News).

    Positions that hold padding count in the mean, as in FedALA's code.

    Args:
        width: The width of the embeddings and of the hidden layer.

    Source: Joulin et al. 2017; FedALA, section "Experiments".
    """
    return FastText(vocabulary("fasttext", spec), width, spec.outputs)
