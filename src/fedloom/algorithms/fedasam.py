"""FedASAM and FedSAM: local steps towards flat minima, and optionally an average of the server's late models."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import AggregatedReplies, Algorithm, Message, Plan, algorithms
from fedloom.config.fields import NonNegative, Share
from fedloom.flat.layout import Layout
from fedloom.flat.module import Batch
from fedloom.local.cohort import Cohort
from fedloom.round import Round


class SharpnessAware(Algorithm, ABC):
    """FedAvg whose clients step with the gradient at w + e(w): the worst point near w, to first order, on the same batch.

    Subclasses compute e(w). Models are averaged by samples.

    Args:
        rho: Size of the perturbation e(w) (FedMR: 0.1; Caldarola et al.: 0.1 for SAM, 0.7 for ASAM).
        swa: Evaluate the mean of the server's models of the last rounds (before these, the server's model).
        swa_start: Share of the rounds after which that mean begins.
    """

    rho: NonNegative = 0.1
    swa: bool = False
    swa_start: Share = 0.75

    fits_once: ClassVar[bool] = False

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        if self.swa:
            self.state["swa_model"] = plan.initial.clone()
            self.state["swa_count"] = torch.zeros(1, dtype=torch.int64)

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        super().update(round, aggregate)
        if self.swa and round.number >= math.ceil(self.swa_start * round.rounds - 1e-9):
            count = int(self.state["swa_count"])
            mean = (count * self.state["swa_model"] + self.state["model"]) / (count + 1)
            self.state |= {"swa_model": mean, "swa_count": torch.full((1,), count + 1)}

    def model(self) -> Tensor:
        averaged = self.swa and int(self.state["swa_count"]) > 0
        return self.state["swa_model" if averaged else "model"]

    @property
    def needs_total_rounds(self) -> bool:
        return self.swa

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        layout = cohort.layout

        def gradient_fn(rows: Tensor, batch: Batch, context: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            weights = rows[:, : layout.trainable]
            current = weights.clone()
            loss, gradient = cohort.gradient(rows, batch)
            weights.add_(self.ascent(layout, weights, gradient))
            _, gradient = cohort.gradient(rows, batch)
            weights.copy_(current)
            return loss, gradient

        return {"model": cohort.fit(inbox["model"], gradient_fn=gradient_fn, pad=True).model}

    @abstractmethod
    def ascent(self, layout: Layout, weights: Tensor, gradient: Tensor) -> Tensor:
        """Return e(w) `[k, T]` for the weights and gradients of k clients."""


@algorithms.register("fedsam")
class FedSAM(SharpnessAware):
    """FedAvg with sharpness-aware local steps: the gradient is taken at w + rho g / ||g||, g the batch's gradient at w.

    Each step costs two passes.
    Source: Caldarola et al. 2022; Foret et al. 2021.
    Use it when models overfit their clients and the average stays behind; it doubles the price of a step.
    """

    def ascent(self, layout: Layout, weights: Tensor, gradient: Tensor) -> Tensor:
        ascent: Tensor = gradient * (self.rho / (gradient.norm(dim=1, keepdim=True) + 1e-16))
        return ascent


@algorithms.register("fedasam")
class FedASAM(SharpnessAware):
    """FedAvg with adaptive sharpness-aware local steps: the gradient is taken at w + rho T^2 g / ||T g||.

    T(w) = |w| + `eta` for tensors with "weight" in their name (those of batch norm too), 1 for the others. Each step costs
    two passes. FedMR compares with rho 0.1, eta 0 and no averaging.
    Source: Caldarola et al. 2022.
    Use it as FedSAM where layers have weights of very different size; `swa` steadies the curve late in a run.

    Args:
        eta: Offset of T (Caldarola et al.: 0.2); at 0 a weight of 0 is not perturbed.
    """

    eta: NonNegative = 0.0

    def ascent(self, layout: Layout, weights: Tensor, gradient: Tensor) -> Tensor:
        scale = torch.ones_like(weights)
        for columns in layout.unit(lambda tensor: tensor.stop <= layout.trainable and "weight" in tensor.name):
            scale[:, columns] = weights[:, columns].abs() + self.eta
        scaled = scale * gradient
        ascent: Tensor = scale * scaled * (self.rho / (scaled.norm(dim=1, keepdim=True) + 1e-16))
        return ascent
