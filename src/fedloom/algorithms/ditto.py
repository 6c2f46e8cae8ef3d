from typing import ClassVar

from torch import Tensor

from fedloom.algorithm import Cohort, Facts, algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.fedprox import proximal
from fedloom.algorithms.sharing import PartlyShared
from fedloom.common.fields import Count, NonNegative


@algorithms.register("ditto")
class Ditto(PartlyShared):
    """Ditto: in addition to FedAvg, each client trains a personal model v on L_i(v) + (lambda / 2)
    ||v - w_t||^2.

    In each round v trains first, with w_t the start of local training; then the client trains w_t
    as in FedAvg and uploads the result. Personal models start equal, have their own batch-norm
    statistics and are scored; a client that has not trained yet scores the download. lambda = 0 is
    local training.
    Source: Li et al. 2021, algorithm 1; FedALA, appendix G.
    Use it when clients differ much and you need a global model and personal models; it costs a
    second training.

    Args:
        regularisation: lambda (FedALA: 0.1, searched between 1e-4 and 10).
        personal_epochs: Epochs of v in each round (FedALA: 2).
    """

    regularisation: NonNegative = 0.1
    personal_epochs: Count = 2

    own_model: ClassVar[str] = "ditto_personal"
    base_facts = Facts(fits_once=False, initial="all")

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        cohort.memory[self.own_model] = cohort.fit(
            cohort.memory.get(self.own_model, cohort.initial),
            correction=proximal(self.regularisation) if self.regularisation else None,
            context={"server_model": start[:, : cohort.layout.trainable]},
            purpose="personal",
            epochs=self.personal_epochs,
        ).model
        return cohort.fit(start).model
