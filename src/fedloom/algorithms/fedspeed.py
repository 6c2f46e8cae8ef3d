from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Facts, algorithms
from fedloom.algorithm.records import Message, server_model
from fedloom.algorithms.feddyn import Drifting
from fedloom.algorithms.sharpness import sharp_gradient
from fedloom.common.fields import NonNegative
from fedloom.local.cohort import Cohort, Context
from fedloom.local.optimizer import GradientFn


@algorithms.register("fedspeed")
class FedSpeed(Drifting):
    """FedSpeed: FedDyn with FedSAM's gradient: local steps follow g' + alpha (w - w_t + h_i), with
    g' the gradient at w + rho g / ||g||.

    g is the batch's gradient at w; clients remember h_i <- h_i + w_i - w_t, `[T]`. Server: w <-
    mean_i w_i + (1/N) sum over all clients of h_i, uniform over the round; statistics are averaged.
    With rho 0 and clients of equal size this is FedDyn. alpha 0 leaves the sum of h_i in the
    server's step. Each step costs two passes.
    Source: Sun et al. 2023, algorithm 1, in the form of the authors' code.
    Use it when clients are skewed and models overfit them; set a gradient clip.

    Args:
        alpha: Weight of the proximal term (authors' code: 0.1).
        rho: Size of the perturbation (authors' code: 0.1).
    """

    alpha: NonNegative = 0.1
    rho: NonNegative = 0.1

    sends: ClassVar[tuple[str, ...]] = ("model",)
    facts = Facts(fits_once=False)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return self.descend(cohort, inbox, sharp_gradient(cohort, self.rho))

    def descend(
        self,
        cohort: Cohort,
        inbox: Message,
        gradient_fn: GradientFn,
        state: dict[str, Tensor] | None = None,
    ) -> Message:
        """Train with the pull towards w_t - h_i, and update h_i.

        Args:
            cohort: The clients.
            inbox: The server's message.
            gradient_fn: Computes loss and gradient.
            state: Tensors that `gradient_fn` changes in place, `[k, ...]`.

        Returns:
            The trained models.
        """
        count = cohort.layout.trainable
        sent = server_model(inbox)[:, :count]
        history = cohort.memory.get("fedspeed_history", torch.zeros_like(sent))

        def pull(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
            return gradient.add_(weights - context["centre"], alpha=self.alpha)

        context = {"centre": sent - history}
        trained = cohort.fit(
            inbox["model"],
            gradient_fn=gradient_fn,
            correction=pull,
            context=context,
            state=state,
            pad=True,
        )
        moved = trained.model[:, :count] - sent
        cohort.memory.write("fedspeed_history", history + moved, cohort.uploads)
        return {"model": trained.model}
