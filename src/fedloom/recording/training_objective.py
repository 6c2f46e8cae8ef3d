"""The global training objective before and after local training (FedALA, figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.config.fields import Count
from fedloom.recording.recorder import ClientExchange, Measurement, Recorder, RunContext, recorders


@recorders.register("objective")
@dataclass(frozen=True)
class TrainingObjective(Recorder):
    """The training objective over a round's clients, of the models they receive and of the models they upload.

    F = sum_i n_i f_i(w_i) / sum_i n_i over the clients that replied, with n_i training samples each and f_i the mean cross
    entropy on them in evaluation mode; w_i is the model received (`before`) or the model uploaded (`after`). Under `ala` local
    training starts from a blend, not from the model received, so the step from before to after includes the blending. Recorded
    in every round whose number `every` divides. Source: Zhang et al. 2023 (FedALA), figure 5.
    """

    every: Count = 10

    def measure(self, number: int, exchanges: Sequence[ClientExchange], context: RunContext) -> Measurement | None:
        if number % self.every or not exchanges:
            return None
        received, uploaded, total = 0.0, 0.0, 0
        for exchange in exchanges:
            loss, samples = context.training_loss(exchange.received, exchange.client, exchange.received_integers)
            received, total = received + loss, total + samples
            uploaded += context.training_loss(exchange.uploaded, exchange.client, exchange.uploaded_integers)[0]
        return Measurement({"before": received / total, "after": uploaded / total})
