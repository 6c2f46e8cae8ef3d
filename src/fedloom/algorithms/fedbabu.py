from typing import Literal

from torch import Tensor

from fedloom.algorithm import Cohort, algorithms
from fedloom.algorithms.kept_layers import KeepsHead
from fedloom.config.fields import NonNegativeInt
from fedloom.records import Message


@algorithms.register("fedbabu")
class FedBABU(KeepsHead):
    """FedBABU: FedAvg of the base under one random head, the task's initial one, which never moves
    and never travels.

    Before a client uses the received model it tunes it on its own samples; what is tuned is
    forgotten again. The global model is the base under the initial head. `finetune_epochs = 0`
    scores that.
    Source: Oh et al. 2022 (FedBABU), algorithm 1.
    Use it when each client needs a model of its own and training should cost no more than FedAvg.

    Args:
        finetune_epochs: Epochs of tuning (authors: 5; PFLlib: 10).
        finetune_scope: The `head`, the `body` under it or the `full` model is tuned (PFLlib: full).
    """

    finetune_epochs: NonNegativeInt = 5
    finetune_scope: Literal["head", "body", "full"] = "full"

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        return cohort.fit(start, only=self.split(cohort)[0]).model

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        if self.finetune_epochs == 0:
            return model
        base, head = self.split(cohort)
        only = {"head": head, "body": base, "full": None}[self.finetune_scope]
        return cohort.fit(model, only=only, purpose="finetune", epochs=self.finetune_epochs).model
