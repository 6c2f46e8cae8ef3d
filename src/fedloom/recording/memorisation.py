"""Accuracy of the global model on right and on wrong training labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.fields import Count
from fedloom.errors import InvalidValue
from fedloom.recording.recorder import ClientExchange, Measurement, Recorder, RunContext, Series, Tensors, recorders

CURVES = ("right", "memorised", "corrected")


@recorders.register("memorisation")
@dataclass(frozen=True)
class Memorisation(Recorder):
    """Accuracy of the global model on training samples whose labels are right, and on those whose labels are wrong.

    Over the training samples of all clients that train: `right`, where the given label is the true one; where it is wrong,
    the share that the model classifies as given (`memorised`) and the share that it classifies by the true label
    (`corrected`). The last two need `label_noise`. Recorded in every round whose number `every` divides. Costs a pass over the
    training set.
    """

    every: Count = 10

    def require(self, context: RunContext) -> None:
        if not context.task.objective.classes:
            raise InvalidValue(f"the targets of {context.task.dataset.name!r} are no classes")

    def measure(self, number: int, exchanges: Sequence[ClientExchange], context: RunContext) -> Measurement | None:
        return None if number % self.every else Measurement({})

    def complete(self, value: Any, method: Algorithm, integers: Tensor, context: RunContext) -> Any:
        task = context.task
        trained = np.sort(task.partition.indices[: task.partition.offsets[context.trainers]])
        index = torch.from_numpy(trained).to(task.train.labels.device)
        samples = task.train[index]
        true = samples.labels if task.true_labels is None else task.true_labels[index]
        wrong = samples.labels != true
        groups = (samples[~wrong], samples[wrong], replace(samples, labels=true)[wrong])
        model, score = method.model(), context.evaluator.score
        scores = [score(model, group, integers)["accuracy"] if len(group) else None for group in groups]
        return {"samples": [len(groups[0]), len(groups[1])], **dict(zip(CURVES, scores, strict=True))}

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        """Return the numbers of `samples` with right and with wrong labels, and the curves that have samples."""
        entry, curves = series[0][1], super().result(series, tensors, context)
        return {
            **{name: values for name, values in curves.items() if entry.get(name, 0) is not None},
            "samples": entry["samples"],
        }
