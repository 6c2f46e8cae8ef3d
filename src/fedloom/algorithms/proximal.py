"""FedProx, Ditto, FedAvg-C and FedProx-C: terms that keep training near the server's model, and models that clients tune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, algorithms, server_model
from fedloom.algorithms.sharing import PartlyShared
from fedloom.config.fields import Count, NonNegative, NonNegativeInt, Positive
from fedloom.local.cohort import Cohort, Context, Correction


@algorithms.register("fedprox")
@dataclass
class FedProx(Algorithm):
    """FedAvg with a proximal term: clients minimise L_i(w) + (mu/2) ||w - w_t||^2.

    The term is over the trainable parameters; models are averaged by samples.
    Source: Li et al. 2020, algorithm 2.
    Use it when local training runs long or uneven and FedAvg jumps; `mu` costs nothing and needs tuning.

    Args:
        mu: Strength of the term; 0 is FedAvg (FedMR: 0.01 for CIFAR-10, 0.001 for CIFAR-100, 0.1 for FEMNIST).
        prox_factor: Factor before mu ||w - w_t||^2: 0.5 as in the paper; 1 as in FedDC's code doubles the pull.
    """

    mu: NonNegative = 0.01
    prox_factor: Positive = 0.5

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        context = {"server_model": server_model(inbox)[:, : cohort.layout.trainable]}
        term = proximal(2 * self.prox_factor * self.mu)
        return {"model": cohort.fit(inbox["model"], correction=term, context=context).model}


def proximal(strength: float) -> Correction:
    """Return a correction by the gradient of (strength / 2) ||w - w_t||^2, w_t the `server_model [k, T]` of the context."""

    def correct(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
        return gradient.add_(torch.sub(weights, context["server_model"]), alpha=strength)

    return correct


@algorithms.register("ditto")
@dataclass
class Ditto(PartlyShared):
    """Ditto: beside FedAvg, each client trains a personal model v on L_i(v) + (lambda / 2) ||v - w_t||^2.

    In each round v trains first, with w_t the start of local training; then the client trains w_t as in FedAvg and uploads
    that. Personal models start equal, have batch-norm statistics of their own and are scored (for a client that has not
    trained yet, the download is). lambda = 0 is local training.
    Source: Li et al. 2021, algorithm 1; FedALA, appendix G.
    Use it when clients differ much and you want a global model and personal ones at once; it costs a second training.

    Args:
        regularisation: lambda (FedALA: 0.1, searched between 1e-4 and 10).
        personal_epochs: Epochs of v in each round (FedALA: 2).
    """

    regularisation: NonNegative = 0.1
    personal_epochs: Count = 2

    own_model: ClassVar[str] = "ditto_personal"
    fits_once: ClassVar[bool] = False

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        cohort.memory[self.own_model] = cohort.fit(
            cohort.memory.get(self.own_model, cohort.initial),
            correction=proximal(self.regularisation) if self.regularisation else None,
            context={"server_model": start[:, : cohort.layout.trainable]},
            purpose="personal",
            epochs=self.personal_epochs,
        ).model
        return cohort.fit(start).model


@algorithms.register("fedavg_c")
@dataclass
class FedAvgC(PartlyShared):
    """FedAvg whose clients fine-tune the whole downloaded model before they use it.

    A client scores the fine-tuned model.
    Source: Zhang et al. 2023 (FedALA), section "Experiments".
    Use it as the simplest personal model, and as the yardstick for the personalised methods.

    Args:
        finetune_epochs: Epochs of fine-tuning (no paper gives them; FedALA's times imply about 14).
        finetune_scope: `init` trains from the fine-tuned model and uploads the result; `eval_only` fine-tunes for scoring alone
            and trains from the download, as FedAvg does.
    """

    finetune_epochs: NonNegativeInt = 10
    finetune_scope: Literal["init", "eval_only"] = "init"

    fits_once: ClassVar[bool] = False

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        if self.finetune_epochs == 0:
            return model
        return self.descend(cohort, model, inbox, purpose="finetune", epochs=self.finetune_epochs)

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        if self.finetune_scope == "init":
            start = self.initialise(cohort, start, inbox)
        return self.descend(cohort, start, inbox, purpose="batches", epochs=None)

    def descend(self, cohort: Cohort, start: Tensor, inbox: Message, *, purpose: str, epochs: int | None) -> Tensor:
        """Train locally, in the same way in both phases."""
        return cohort.fit(start, purpose=purpose, epochs=epochs).model


@algorithms.register("fedprox_c")
@dataclass
class FedProxC(FedAvgC):
    """FedProx whose clients fine-tune the whole downloaded model before they use it, with the proximal term in both phases.

    Fine-tuning as in `fedavg_c`; w_t in (mu / 2) ||w - w_t||^2 is the server's model.
    Source: Zhang et al. 2023 (FedALA), section "Experiments".
    Use it as `fedavg_c` where clients have so little data that fine-tuning runs away from the download.

    Args:
        mu: Strength of the proximal term (FedALA: 0.001).
    """

    mu: NonNegative = 0.001

    def descend(self, cohort: Cohort, start: Tensor, inbox: Message, *, purpose: str, epochs: int | None) -> Tensor:
        context = {"server_model": self.complete(cohort, server_model(inbox))[:, : cohort.layout.trainable]}
        return cohort.fit(start, correction=proximal(self.mu), context=context, purpose=purpose, epochs=epochs).model
