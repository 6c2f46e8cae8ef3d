"""FedAvg-C and FedProx-C: the downloaded model is fine-tuned before a client uses it."""

from typing import Literal

from torch import Tensor

from fedloom.algorithm import Cohort, Facts, algorithms
from fedloom.algorithm.records import Message, server_model
from fedloom.algorithms.fedprox import proximal
from fedloom.algorithms.sharing import PartlyShared
from fedloom.common.fields import NonNegative, NonNegativeInt


@algorithms.register("fedavg_c")
class FedAvgC(PartlyShared):
    """FedAvg with clients that fine-tune the whole downloaded model before they use it.

    A client scores the fine-tuned model.
    Source: Zhang et al. 2023 (FedALA), section "Experiments".
    Use it as the simplest personal model, and as the baseline of the personalised methods.

    Args:
        finetune_epochs: Epochs of fine-tuning (no paper gives them; FedALA's times imply about 14).
        finetune_scope: `init` also trains and uploads from the fine-tuned model; `eval_only`
            fine-tunes only for scoring.
    """

    finetune_epochs: NonNegativeInt = 10
    finetune_scope: Literal["init", "eval_only"] = "init"

    base_facts = Facts(fits_once=False)

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        if self.finetune_epochs == 0:
            return model
        return self.descend(cohort, model, inbox, purpose="finetune", epochs=self.finetune_epochs)

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        if self.finetune_scope == "init":
            start = self.initialise(cohort, start, inbox)
        return self.descend(cohort, start, inbox, purpose="batches", epochs=None)

    def descend(
        self, cohort: Cohort, start: Tensor, inbox: Message, *, purpose: str, epochs: int | None
    ) -> Tensor:
        """Train locally from `start [k, P]`, before use and in the round.

        Args:
            cohort: The clients.
            start: Initial models, `[k, P]`.
            inbox: The message of the server.
            purpose: Name of the random stream of the batches.
            epochs: Number of epochs; None for the local epochs.

        Returns:
            The trained models, `[k, P]`.
        """
        return cohort.fit(start, purpose=purpose, epochs=epochs).model


@algorithms.register("fedprox_c")
class FedProxC(FedAvgC):
    """FedProx with clients that fine-tune the downloaded model before use, with the proximal term
    in both phases.

    Fine-tuning as in `fedavg_c`; w_t in (mu / 2) ||w - w_t||^2 is the server's model.
    Source: Zhang et al. 2023 (FedALA), section "Experiments".
    Use it like `fedavg_c` where clients have few samples, so that fine-tuning moves too far from
    the download.

    Args:
        mu: Strength of the proximal term (FedALA: 0.001).
    """

    mu: NonNegative = 0.001

    def descend(
        self, cohort: Cohort, start: Tensor, inbox: Message, *, purpose: str, epochs: int | None
    ) -> Tensor:
        context = {
            "server_model": self.complete(cohort, server_model(inbox))[:, : cohort.layout.trainable]
        }
        return cohort.fit(
            start, correction=proximal(self.mu), context=context, purpose=purpose, epochs=epochs
        ).model
