"""The local models of a round against the global model aggregated from them (FedMR, figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.fields import Count
from fedloom.recording.recorder import ClientExchange, Measurement, Recorder, RunContext, Series, Tensors, recorders


@recorders.register("aggregate")
@dataclass(frozen=True)
class Aggregate(Recorder):
    """Test accuracy and loss of the models that the clients upload, and of the global model aggregated from them.

    Model k is the one in slot k: for methods with a pool (Indep, FedMR) the k-th model of the pool after local training, for
    the others the k-th selected client's. The first `models` slots are recorded, all by default, in every round whose number
    `every` divides. Costs a pass over the test set for each. Source: Hu et al. 2022 (FedMR), figure 4 (figure 5 in the KDD
    2024 version), which shows four models.
    """

    every: Count = 10
    models: Count | None = None

    def require(self, context: RunContext) -> None:
        context.require_test_samples()

    def measure(self, number: int, exchanges: Sequence[ClientExchange], context: RunContext) -> Measurement | None:
        scored = [exchange for exchange in exchanges if self.models is None or exchange.slot < self.models]
        if number % self.every or not scored:
            return None
        scores = [context.test_score(exchange.uploaded, exchange.uploaded_integers) for exchange in scored]
        values = {measure: [score[measure] for score in scores] for measure in _measures(context)}
        return Measurement({"slots": [exchange.slot for exchange in scored], **values})

    def complete(self, value: Any, method: Algorithm, integers: Tensor, context: RunContext) -> Any:
        score = context.test_score(method.model(), integers)
        return {**value, "global": {measure: score[measure] for measure in _measures(context)}}

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        """Return `models[measure][slot]` with a value for each recorded round, None where no client replied in that slot."""
        slots = sorted({slot for _, value in series for slot in value["slots"]})
        models = {
            measure: [[dict(zip(value["slots"], value[measure], strict=True)).get(slot) for _, value in series] for slot in slots]
            for measure in _measures(context)
        }  # fmt: skip
        rounds, values = zip(*series, strict=True)
        aggregated = {measure: [value["global"][measure] for value in values] for measure in _measures(context)}
        return {"rounds": list(rounds), "slots": slots, "models": models, "global": aggregated}


def _measures(context: RunContext) -> tuple[str, ...]:
    """Return the metric that models are judged by, and the loss."""
    return tuple(dict.fromkeys((context.task.objective.metric.name, "loss")))
