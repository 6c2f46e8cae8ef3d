"""Models of text: fastText for topics, and recurrent networks that predict the next token."""

from typing import Literal

from torch import Tensor, nn

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count
from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.shapes import vocabulary


class FastText(nn.Module):
    """Tokens `[n, length]` -> `[n, classes]`: the mean embedding and two linear layers without
    activation.
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
    """FedALA's fastText: mean of 32-wide embeddings, two linear layers (3,157,508 parameters on AG
    News).

    Padding counts in the mean, as in FedALA's code.

    Args:
        width: Width of the embeddings and of the hidden layer.

    Returns:
        A module from tokens `[b, length]` to logits `[b, Y]`.

    Source: Joulin et al. 2017; FedALA, section "Experiments".
    """
    return FastText(vocabulary("fasttext", spec), width, spec.outputs)


class Recurrent(nn.Module):
    """Tokens `[n, length]` -> `[n, length, vocabulary]`. The output at a position does not depend
    on later tokens.
    """

    def __init__(self, tokens: int, embedding: int, body: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding, padding_idx=0)
        self.body = body
        self.head = nn.Linear(body.hidden_size, tokens)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(x))[0])
        return logits


@models.register("recurrent")
def recurrent(
    spec: DataSpec,
    *,
    cell: Literal["lstm", "gru"] = "lstm",
    embedding: Count = 8,
    width: Count = 256,
    layers: Count = 2,
) -> nn.Module:
    """Next token: an embedding, `layers` of LSTM or GRU and a linear layer.

    By default this is McMahan's and LEAF's model for Shakespeare. For next words, Reddi et al.
    (ICLR 2021) use `embedding=96, width=670, layers=1`.

    Args:
        cell: `lstm` or `gru`.
        embedding: Width of the embeddings.
        width: Width of the recurrent layers.
        layers: Number of recurrent layers.

    Returns:
        A module from tokens `[b, length]` to logits `[b, length, tokens]`.

    Raises:
        InvalidValue: The data are not tokens, or the objective does not predict tokens.

    Source: McMahan et al., AISTATS 2017, section 3; LEAF (Caldas et al., 2018).
    """
    tokens = vocabulary("recurrent", spec)
    if spec.outputs != tokens:
        raise InvalidValue(
            f"recurrent predicts one of {tokens} tokens, but the data need {spec.outputs} outputs: "
            "set objective = 'sequence'"
        )
    kind = nn.LSTM if cell == "lstm" else nn.GRU
    return Recurrent(tokens, embedding, kind(embedding, width, layers, batch_first=True))
