from typing import Literal

from torch import Tensor

from fedloom.algorithm import Cohort, algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.kept_layers import KeepsHead
from fedloom.common.fields import NonNegativeInt


@algorithms.register("fedbabu")
class FedBABU(KeepsHead):
    """FedBABU: FedAvg of the base under one random head. The head is the initial one; it never
    trains and never travels.

    Before a client uses the received model, it tunes the model on its own samples; the tuned model
    is not stored. The global model is the base under the initial head. `finetune_epochs = 0` scores
    the global model.
    Source: Oh et al. 2022 (FedBABU), algorithm 1.
    Use it when each client needs a personal model and training should cost no more than FedAvg.

    Args:
        finetune_epochs: Epochs of tuning (authors: 5; PFLlib: 10).
        finetune_scope: Tuned layers: the `head`, the `body` under it or the `full` model (PFLlib:
            full).
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
