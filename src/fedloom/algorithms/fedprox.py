import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, algorithms
from fedloom.algorithm.records import Message, server_model
from fedloom.common.fields import NonNegative, Positive
from fedloom.local.cohort import Cohort, Context, Correction


@algorithms.register("fedprox")
class FedProx(Algorithm):
    """FedAvg with a proximal term: clients minimise L_i(w) + (mu/2) ||w - w_t||^2.

    The term is over the trainable parameters; models are averaged by samples.
    Source: Li et al. 2020, algorithm 2.
    Use it when local training is long or differs between clients, so that FedAvg is unstable; the
    term costs almost nothing, but `mu` needs tuning.

    Args:
        mu: Strength of the term; 0 is FedAvg (FedMR: 0.01 for CIFAR-10, 0.001 for CIFAR-100, 0.1
            for FEMNIST).
        prox_factor: Factor before mu ||w - w_t||^2: 0.5 as in the paper; 1 as in FedDC's code
            doubles the pull.
    """

    mu: NonNegative = 0.01
    prox_factor: Positive = 0.5

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        context = {"server_model": server_model(inbox)[:, : cohort.layout.trainable]}
        term = proximal(2 * self.prox_factor * self.mu)
        return {"model": cohort.fit(inbox["model"], correction=term, context=context).model}


def proximal(strength: float) -> Correction:
    """Return a correction by the gradient of (strength / 2) ||w - w_t||^2, with w_t the
    `server_model [k, T]` of the context.
    """

    def correct(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
        return gradient.add_(torch.sub(weights, context["server_model"]), alpha=strength)

    return correct
