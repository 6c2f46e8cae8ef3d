"""FedProx: hold local training near the server's model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, algorithms, server_model
from fedloom.config.fields import NonNegative, Positive
from fedloom.local.cohort import Cohort, Context, Correction


@algorithms.register("fedprox")
@dataclass
class FedProx(Algorithm):
    """FedAvg with a proximal term: clients minimise L_i(w) + (mu/2) ||w - w_t||^2.

    The term is over the trainable parameters; models are averaged by samples. `prox_factor` stands in front of
    mu ||w - w_t||^2: 0.5 as in the paper, 1 as in FedDC's code (where the pull is thus twice mu). mu = 0 is FedAvg.
    Source: Li et al. 2020, algorithm 2.
    Use it when local training runs long or uneven and FedAvg jumps; `mu` costs nothing and needs tuning.
    """

    mu: NonNegative = 0.01
    prox_factor: Positive = 0.5

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        context = {"server_model": server_model(inbox)[:, : cohort.layout.trainable]}
        term = proximal(2 * self.prox_factor * self.mu)
        return {"model": cohort.fit(inbox["model"], correction=term, context=context).model}


def proximal(strength: float) -> Correction:
    """Adds the gradient of (strength / 2) ||w - w_t||^2, where w_t is the `server_model [k, T]` of the context."""

    def correct(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
        return gradient.add_(torch.sub(weights, context["server_model"]), alpha=strength)

    return correct
