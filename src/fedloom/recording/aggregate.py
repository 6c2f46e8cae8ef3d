"""The local models of a round against the global model that is made of them (FedMR, figure 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.checks import require_at_least
from fedloom.recording.recorder import Exchange, Note, Recorder, RunContext, Series, recorders


@recorders.register("aggregate")
@dataclass(frozen=True)
class Aggregate(Recorder):
    """Test accuracy and loss of the models that the clients upload, and of the global model that the round makes of them.

    Model k is the one in slot k: for methods with a pool (Indep, FedMR) the k-th model of the pool after local training, for
    the others the k-th selected client's. The first `models` slots are noted, all by default, in every round whose number
    `every` divides. Costs a pass over the test set for each. Source: Hu et al. 2022 (FedMR), figure 4 (figure 5 in the KDD
    2024 version), which shows four models.
    """

    every: int = 10
    models: int | None = None

    def __post_init__(self) -> None:
        require_at_least("every", self.every, 1)
        if self.models is not None:
            require_at_least("models", self.models, 1)

    @property
    def name(self) -> str:
        return "aggregate"

    def require(self, scene: RunContext) -> None:
        scene.require_test_samples()

    def note(self, number: int, exchanges: Sequence[Exchange], scene: RunContext) -> Note | None:
        chosen = [one for one in exchanges if self.models is None or one.slot < self.models]
        if number % self.every or not chosen:
            return None
        scores = [scene.test_score(one.uploaded, one.uploaded_integers) for one in chosen]
        return Note(
            {
                "slots": [one.slot for one in chosen],
                "accuracy": [score.accuracy for score in scores],
                "loss": [score.loss for score in scores],
            }
        )

    def settle(self, value: Any, method: Algorithm, integers: Tensor, scene: RunContext) -> Any:
        score = scene.test_score(method.model(), integers)
        return {**value, "global": {"accuracy": score.accuracy, "loss": score.loss}}

    def result(self, series: Series, tensors: Mapping[int, Mapping[str, Tensor]], scene: RunContext) -> dict[str, Any]:
        """`models[measure][slot]` holds a value a noted round, None where nobody answered in that slot."""
        slots = sorted({slot for _, value in series for slot in value["slots"]})
        models = {
            measure: [[dict(zip(value["slots"], value[measure], strict=True)).get(slot) for _, value in series] for slot in slots]
            for measure in ("accuracy", "loss")
        }  # fmt: skip
        return {
            "kind": "aggregate",
            "rounds": [number for number, _ in series],
            "slots": slots,
            "models": models,
            "global": {measure: [value["global"][measure] for _, value in series] for measure in ("accuracy", "loss")},
        }
