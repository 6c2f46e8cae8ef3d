from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import algorithms
from fedloom.algorithm.records import Message, server_model
from fedloom.algorithms.statistics import require_classes
from fedloom.common.fields import NonNegative, Positive
from fedloom.flat.module import Batch
from fedloom.local.changed_loss import Observed
from fedloom.local.cohort import Cohort
from fedloom.local.distillation import divergence, teacher_outputs
from fedloom.parts.hooks import Inner
from fedloom.parts.loss_term import LossTerm


@algorithms.register("fedntd")
class FedNTD(LossTerm):
    """Not-true distillation: clients minimise L_i(w) + beta temperature^2 KL(q_t || q).

    q and q_t are the softmaxes, at `temperature` and over the classes other than the label, of the
    trained and the received model (in evaluation mode). With two classes the term is 0. Source: Lee
    et al. 2022 (FedNTD), equations 3 and 4.
    Use it when clients hold few classes and local training forgets the others; a step costs an
    additional forward pass.

    Args:
        method: Inner method, such as fedavg or fedmr.
        beta: Weight of the term (authors: 1); 0 is the inner method.
        temperature: Temperature of both softmaxes (authors: 1).
    """

    beta: NonNegative = 1.0
    temperature: Positive = 1.0

    needs = (require_classes,)

    requires: ClassVar[tuple[str, ...]] = ("one download",)

    def context(self, cohort: Cohort, inbox: Message, inner: Inner) -> dict[str, Tensor]:
        return {"teacher": inner.algorithm.complete(cohort, server_model(inbox))}

    def change(
        self, loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]
    ) -> Tensor:
        true = torch.arange(
            net.outputs.shape[-1], device=batch.labels.device
        ) == batch.labels.unsqueeze(-1)
        teacher = teacher_outputs(net, context["teacher"], batch)
        return loss + self.beta * self.temperature**2 * divergence(
            teacher, net.outputs, self.temperature, true
        )
