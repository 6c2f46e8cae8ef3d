"""FedSAM and FedASAM: local steps towards flat minima, and optionally an average of the server's
late models.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan
from fedloom.algorithms.sharpness import TINY, gradient_ahead
from fedloom.common.fields import NonNegative, Share
from fedloom.flat.layout import Layout
from fedloom.flat.module import Batch


@algorithms.register("fedsam")
class FedSAM(Algorithm):
    """FedAvg with sharpness-aware local steps: the gradient is taken at w + rho g / ||g||, with g
    the batch's gradient at w.

    To first order, this is the point of largest loss near w, on the same batch. Each step costs two
    passes. Models are averaged by samples.
    Source: Caldarola et al. 2022; Foret et al. 2021.
    Use it when models overfit their clients and the average is much worse than they are; it doubles
    the cost of a step.

    Args:
        rho: Size of the perturbation (FedMR: 0.1; Caldarola et al.: 0.1 for SAM, 0.7 for ASAM).
        swa: Evaluate the mean of the server's models of the last rounds; before these, the server's
            model.
        swa_start: Share of the rounds before this mean starts.
    """

    rho: NonNegative = 0.1
    swa: bool = False
    swa_start: Share = 0.75

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        if self.swa:
            self.state["swa_model"] = plan.initial.clone()
            self.state["swa_count"] = torch.zeros(1, dtype=torch.int64)

    def update(self, round: Round, aggregate: Aggregate) -> None:
        super().update(round, aggregate)
        if self.swa:
            count = int(self.state["swa_count"])
            late = round.number >= self.swa_start * round.rounds - 1e-9
            mean = (count * self.state["swa_model"] + self.state["model"]) / (count + 1)
            self.state |= {"swa_model": mean, "swa_count": torch.full((1,), count + late)}

    def model(self) -> Tensor:
        return self.state["swa_model" if self.swa else "model"]

    @property
    def facts(self) -> Facts:
        return Facts(fits_once=False, needs_total_rounds=self.swa)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        def gradient_fn(
            rows: Tensor, batch: Batch, context: Mapping[str, Tensor]
        ) -> tuple[Tensor, Tensor]:
            scale = self.scale(cohort.layout, rows[:, : cohort.layout.trainable])
            loss, gradient = cohort.gradient(rows, batch)
            scaled = scale * gradient
            ascent = scale * scaled * (self.rho / (scaled.norm(dim=1, keepdim=True) + TINY))
            return loss, gradient_ahead(cohort, rows, batch, ascent)[1]

        return {"model": cohort.fit(inbox["model"], gradient_fn=gradient_fn, pad=True).model}

    def scale(self, layout: Layout, weights: Tensor) -> Tensor:
        """Return T(w) of the trainable parameters; the perturbation is rho T^2 g / ||T g||.

        Args:
            layout: Positions and names of the tensors in a row.
            weights: Trainable parameters w, `[k, T]`.

        Returns:
            Factors of the coordinates, `[k, T]`; 1 for plain SAM.
        """
        return torch.ones_like(weights)


@algorithms.register("fedasam")
class FedASAM(FedSAM):
    """FedAvg with adaptive sharpness-aware local steps: the gradient is taken at w + rho T^2 g /
    ||T g||.

    T(w) = |w| + `eta` for tensors with "weight" in their name (including batch norm), 1 for all
    others. Each step costs two passes. FedMR compares with rho 0.1, eta 0 and no averaging.
    Source: Caldarola et al. 2022.
    Use it like FedSAM where layers have weights of very different size; `swa` makes the curve
    smoother late in a run.

    Args:
        eta: Offset of T (Caldarola et al.: 0.2); at 0 a weight of 0 is not perturbed.
    """

    eta: NonNegative = 0.0

    def scale(self, layout: Layout, weights: Tensor) -> Tensor:
        scale = torch.ones_like(weights)
        for columns in layout.unit(
            lambda tensor: tensor.stop <= layout.trainable and "weight" in tensor.name
        ):
            scale[:, columns] = weights[:, columns].abs() + self.eta
        return scale
