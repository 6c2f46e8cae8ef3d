"""Recorders of a round's models: accuracies, similarity, objectives and memorised labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count
from fedloom.flat.population import mean_cosine_similarity
from fedloom.recording.recorder import (
    ClientExchange,
    Measurement,
    Recorder,
    RunContext,
    Series,
    Tensors,
    recorders,
)
from fedloom.rounds.federation import Federation

CURVES = ("right", "memorised", "corrected")
"""Curves of the recorder `memorisation`."""


@recorders.register("aggregate")
@dataclass(frozen=True)
class AggregateRecorder(Recorder):
    """Test accuracy and loss of the uploaded models, and of the global model aggregated from them.

    Model k is the model in slot k: for methods with a pool (Indep, FedMR) the k-th model of the
    pool after local training. The first `models` slots are recorded, all by default, in every round
    with a number that `every` divides. Costs a pass over the test set for each model.

    Source: Hu et al. 2022 (FedMR), figure 4 (figure 5 in the KDD 2024 version).
    """

    every: Count = 10
    models: Count | None = None

    def require(self, context: RunContext) -> None:
        context.require_test_samples()

    def measure(
        self, number: int, exchanges: Sequence[ClientExchange], context: RunContext
    ) -> Measurement | None:
        scored = [
            exchange for exchange in exchanges if self.models is None or exchange.slot < self.models
        ]
        if number % self.every or not scored:
            return None
        scores = [
            context.test_score(exchange.uploaded, exchange.uploaded_integers) for exchange in scored
        ]
        values = {measure: [score[measure] for score in scores] for measure in _measures(context)}
        return Measurement({"slots": [exchange.slot for exchange in scored], **values})

    def complete(self, value: Any, federation: Federation, context: RunContext) -> Any:
        score = context.test_score(federation.model(), federation.integers)
        return {**value, "global": {measure: score[measure] for measure in _measures(context)}}

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        """Return `models[measure][slot]` with a value for each recorded round.

        The value is None if no client replied in that slot.
        """
        slots = sorted({slot for _, value in series for slot in value["slots"]})
        models = {
            measure: [_by_round(series, measure, slot) for slot in slots]
            for measure in _measures(context)
        }
        rounds, values = zip(*series, strict=True)
        aggregated = {
            measure: [value["global"][measure] for value in values]
            for measure in _measures(context)
        }
        return {"rounds": list(rounds), "slots": slots, "models": models, "global": aggregated}


def _by_round(series: Series, measure: str, slot: int) -> list[float | None]:
    """Return the values of a slot's model, None where no client replied in that slot."""
    values = [dict(zip(value["slots"], value[measure], strict=True)) for _, value in series]
    return [by_slot.get(slot) for by_slot in values]


def _measures(context: RunContext) -> tuple[str, ...]:
    return tuple(dict.fromkeys((context.task.objective.metric.name, "loss")))


@recorders.register("similarity")
@dataclass(frozen=True)
class Similarity(Recorder):
    """Mean cosine similarity of the uploaded models and, for methods with a pool, of the pool.

    The similarity is the mean of w_i . w_j / (|w_i| |w_j|) over all pairs i < j, of the trainable
    parameters. It is computed for the models `uploaded` in the round and for the `pool` after it.
    Recorded in every round with a number that `every` divides and with at least two uploaded
    models.

    Source: Hu et al. 2022 (FedMR), figure 5 (figure 6 in the KDD 2024 version); the authors' code
    averages over blocks.
    """

    every: Count = 1

    def measure(
        self, number: int, exchanges: Sequence[ClientExchange], context: RunContext
    ) -> Measurement | None:
        if number % self.every or len(exchanges) < 2:
            return None
        rows = torch.stack(
            [exchange.uploaded[: context.task.layout.trainable] for exchange in exchanges]
        )
        return Measurement({"uploaded": float(mean_cosine_similarity(rows))})

    def complete(self, value: Any, federation: Federation, context: RunContext) -> Any:
        return {**value, "pool": federation.pipeline.diagnose().get("pool_cosine")}


@recorders.register("objective")
@dataclass(frozen=True)
class TrainingObjective(Recorder):
    """The training objective over a round's clients, of the received and of the uploaded models.

    F = sum_i n_i f_i(w_i) / sum_i n_i over the clients that replied. Client i has n_i training
    samples, and f_i is the mean cross entropy on them in evaluation mode. w_i is the received model
    (`before`) or the uploaded model (`after`). Under `ala` the step includes the blending. Recorded
    in every round with a number that `every` divides.

    Source: Zhang et al. 2023 (FedALA), figure 5.
    """

    every: Count = 10

    def measure(
        self, number: int, exchanges: Sequence[ClientExchange], context: RunContext
    ) -> Measurement | None:
        if number % self.every or not exchanges:
            return None
        received = 0.0
        uploaded = 0.0
        total = 0
        for exchange in exchanges:
            loss, samples = context.training_loss(
                exchange.received, exchange.client, exchange.received_integers
            )
            received = received + loss
            total = total + samples
            uploaded += context.training_loss(
                exchange.uploaded, exchange.client, exchange.uploaded_integers
            )[0]
        return Measurement({"before": received / total, "after": uploaded / total})


@recorders.register("memorisation")
@dataclass(frozen=True)
class Memorisation(Recorder):
    """Accuracy of the global model on training samples with right labels, and with wrong labels.

    Computed over the training samples of all clients that train. `right`: accuracy on samples with
    the true label. On samples with a wrong label: the share that the model classifies as labelled
    (`memorised`) and by the true label (`corrected`). Recorded in every round with a number that
    `every` divides. Costs a pass over the training set.
    """

    every: Count = 10

    def require(self, context: RunContext) -> None:
        if not context.task.objective.classes:
            raise InvalidValue(f"the targets of {context.task.dataset.name!r} are not classes")

    def measure(
        self, number: int, exchanges: Sequence[ClientExchange], context: RunContext
    ) -> Measurement | None:
        return None if number % self.every else Measurement({})

    def complete(self, value: Any, federation: Federation, context: RunContext) -> Any:
        task = context.task
        trained = np.sort(task.partition.indices[: task.partition.offsets[context.trainers]])
        index = torch.from_numpy(trained).to(task.train.labels.device)
        samples = task.train[index]
        true = samples.labels if task.true_labels is None else task.true_labels[index]
        wrong = samples.labels != true
        groups = (samples[~wrong], samples[wrong], replace(samples, labels=true)[wrong])
        model = federation.model()
        score = context.evaluator.score
        integers = federation.integers
        scores = [
            score(model, group, integers)["accuracy"] if len(group) else None for group in groups
        ]
        return {
            "samples": [len(groups[0]), len(groups[1])],
            **dict(zip(CURVES, scores, strict=True)),
        }
