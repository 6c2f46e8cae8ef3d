from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.statistics import require_classes
from fedloom.common.fields import NonNegative
from fedloom.flat.module import Batch
from fedloom.local.changed_loss import Observed
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner
from fedloom.parts.loss_term import LossTerm


@algorithms.register("fedlc")
class FedLC(LossTerm):
    """Logit calibration: clients train on the logits s_c - tau n_c^(-1/4), with n_c the client's
    samples of class c.

    The softmax omits classes without samples at the client. Models are scored by their own logits.
    Source: Zhang et al. 2022 (FedLC), equation 8, over all classes as in all public code.
    Use it when the numbers of samples per class differ much within clients; it costs almost
    nothing.

    Args:
        method: Inner method, such as fedavg or fedmr.
        tau: Strength of the calibration; 0 is the inner method.
    """

    tau: NonNegative = 1.0

    needs = (require_classes,)
    facts = Facts(fits_once=False)

    def context(self, cohort: Cohort, inbox: Message, inner: Inner) -> dict[str, Tensor]:
        counts = cohort.label_counts.to(cohort.initial)
        shift = counts.clamp_min(1) ** -0.25
        return {"shift": self.tau * torch.where(counts > 0, shift, 1e9)}

    def change(
        self, loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]
    ) -> Tensor:
        calibrated = net.objective.loss(net.outputs - context["shift"], batch.labels)
        return loss + calibrated - net.objective.loss(net.outputs, batch.labels)
