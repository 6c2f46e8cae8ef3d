"""The global training objective before and after local training (FedALA, figure 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.config.checks import require_at_least
from fedloom.recording.recorder import Exchange, Note, Recorder, RunContext, Series, recorders


@recorders.register("objective")
@dataclass(frozen=True)
class Objective(Recorder):
    """The training objective over a round's clients, of the models they receive and of the models they upload.

    F = sum_i n_i f_i(w_i) / sum_i n_i over the clients that replied, with n_i training samples each and f_i the mean cross
    entropy on them in evaluation mode; w_i is the model received (`before`) or the model uploaded (`after`). Under `ala` local
    training starts from a blend, not from the model received, so the step from before to after includes the blending. Noted in
    every round whose number `every` divides. Source: Zhang et al. 2023 (FedALA), figure 5.
    """

    every: int = 10

    def __post_init__(self) -> None:
        require_at_least("every", self.every, 1)

    @property
    def name(self) -> str:
        return "objective"

    def note(self, number: int, exchanges: Sequence[Exchange], scene: RunContext) -> Note | None:
        if number % self.every or not exchanges:
            return None
        before, after, total = 0.0, 0.0, 0
        for one in exchanges:
            loss, samples = scene.training_loss(one.received, one.client, one.received_integers)
            before, total = before + loss, total + samples
            after += scene.training_loss(one.uploaded, one.client, one.uploaded_integers)[0]
        return Note({"before": before / total, "after": after / total})

    def result(self, series: Series, tensors: Mapping[int, Mapping[str, Tensor]], scene: RunContext) -> dict[str, Any]:
        return {
            "kind": "objective",
            "rounds": [number for number, _ in series],
            "before": [value["before"] for _, value in series],
            "after": [value["after"] for _, value in series],
        }
