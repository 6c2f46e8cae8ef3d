"""What the global model learns of right and of wrong training labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.checks import require_at_least
from fedloom.recording.recorder import Exchange, Note, Recorder, RunContext, Series, recorders

CURVES = ("right", "memorised", "corrected")


@recorders.register("memorisation")
@dataclass(frozen=True)
class Memorisation(Recorder):
    """Accuracy of the global model on training samples whose labels are right, and on those whose labels are wrong.

    Over the training samples of all clients that train: `right`, where the given label is the true one; where it is wrong,
    the share that the model classifies as given (`memorised`) and the share that it classifies as is true (`corrected`).
    The last two need `label_noise`. Noted in every round whose number `every` divides. Costs a pass over the training set.
    """

    every: int = 10

    def __post_init__(self) -> None:
        require_at_least("every", self.every, 1)

    @property
    def name(self) -> str:
        return "memorisation"

    def note(self, number: int, exchanges: Sequence[Exchange], scene: RunContext) -> Note | None:
        return None if number % self.every else Note({})

    def settle(self, value: Any, method: Algorithm, integers: Tensor, scene: RunContext) -> Any:
        task = scene.task
        trained = np.sort(task.partition.indices[: task.partition.offsets[scene.trainers]])
        index = torch.from_numpy(trained).to(task.train.labels.device)
        given = task.train[index]
        true = given.labels if task.true_labels is None else task.true_labels[index]
        wrong = given.labels != true
        parts = (given[~wrong], given[wrong], replace(given, labels=true)[wrong])
        model = method.model()
        scores = [scene.evaluator.score(model, part, integers).accuracy if len(part) else None for part in parts]
        return {"samples": [len(parts[0]), len(parts[1])], **dict(zip(CURVES, scores, strict=True))}

    def result(self, series: Series, tensors: Mapping[int, Mapping[str, Tensor]], scene: RunContext) -> dict[str, Any]:
        """`samples` are those with right and with wrong labels; a curve without samples is left out."""
        curves = {name: [value[name] for _, value in series] for name in CURVES if series[0][1][name] is not None}
        return {
            "kind": "memorisation",
            "rounds": [number for number, _ in series],
            "samples": series[0][1]["samples"],
            **curves,
        }
