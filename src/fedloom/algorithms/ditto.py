"""Ditto: a personal model for each client, held to the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedloom.algorithm import Message, algorithms
from fedloom.algorithms.sharing import PartlyShared, pull
from fedloom.config.fields import Count, NonNegative
from fedloom.local.cohort import Cohort


@algorithms.register("ditto")
@dataclass
class Ditto(PartlyShared):
    """Ditto: beside FedAvg, each client trains a personal model v on L_i(v) + (lambda / 2) ||v - w_t||^2.

    Each round v moves for `personal_epochs`, with w_t the model that local training starts from, then the client trains w_t
    as in FedAvg and uploads that. Personal models start equal, hold statistics of their own and are what is scored (for a
    client that has not trained yet, the download). lambda = 0 is local training.
    Source: Li et al. 2021, algorithm 1; FedALA, appendix G.
    Use it when clients differ much and you want a global model and personal ones at once; it costs a second local
    training.
    """

    regularisation: NonNegative = 0.1
    personal_epochs: Count = 2

    scores_start: ClassVar[bool] = False

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        cohort.memory["ditto_personal"] = cohort.fit(
            cohort.memory.get("ditto_personal", cohort.initial),
            correction=pull(self.regularisation) if self.regularisation else None,
            context={"centre": start[:, : cohort.layout.trainable]},
            purpose="personal",
            epochs=self.personal_epochs,
        ).model
        return cohort.fit(start).model

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        return cohort.memory.get("ditto_personal", self.complete(cohort, inbox["model"]))
