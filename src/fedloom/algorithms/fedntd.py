from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.algorithm import Cohort, Message, Plan, algorithms, server_model
from fedloom.algorithms.loss_terms import LossTerm, divergence, require_classes, teacher_outputs
from fedloom.config.fields import NonNegative, Positive
from fedloom.errors import InvalidValue
from fedloom.flat.module import Batch
from fedloom.local.changed_loss import Observed


@algorithms.register("fedntd")
class FedNTD(LossTerm):
    """Not-true distillation: clients minimise L_i(w) + beta temperature^2 KL(q_t || q).

    q and q_t are the softmaxes, at `temperature` and over the classes other than the label, of the trained and the received
    model (in evaluation mode). With two classes the term is 0. Source: Lee et al. 2022 (FedNTD), equations 3 and 4.
    Use it when clients hold few classes and local training forgets the others; a step costs one more forward pass.

    Args:
        method: Method whose clients train, such as fedavg or fedmr.
        beta: Weight of the term (authors: 1); 0 is the method itself.
        temperature: Temperature of both softmaxes (authors: 1).
    """

    beta: NonNegative = 1.0
    temperature: Positive = 1.0

    needs = (require_classes,)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        if not self.single_download or "model" not in self.send(plan.opening()):
            raise InvalidValue(f"fedntd: clients of {self.method} are not sent one model, which is the teacher")

    def context(self, cohort: Cohort, inbox: Message) -> dict[str, Tensor]:
        return {"teacher": self.complete(cohort, server_model(inbox))}

    def change(self, loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
        true = torch.arange(net.outputs.shape[-1], device=batch.labels.device) == batch.labels.unsqueeze(-1)
        teacher = teacher_outputs(net, context["teacher"], batch)
        return loss + self.beta * self.temperature**2 * divergence(teacher, net.outputs, self.temperature, true)
