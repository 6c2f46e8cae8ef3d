"""How alike the models of a round are (FedMR, figure 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.checks import require_at_least
from fedloom.flat.population import mean_cosine_similarity
from fedloom.recording.recorder import Exchange, Note, Recorder, RunContext, Series, recorders


@recorders.register("similarity")
@dataclass(frozen=True)
class Similarity(Recorder):
    """Mean cosine similarity of the models that the clients upload and, where the method keeps a pool, of the pool.

    The mean of w_i . w_j / (|w_i| |w_j|) over all pairs i < j, of the trainable parameters, for the models `uploaded` in the
    round and, for methods with a pool of models (FedMR, Indep), of the `pool` that the round leaves. Noted in every round whose
    number `every` divides and in which two models or more came back. Source: Hu et al. 2022 (FedMR), figure 5 (figure 6 in the
    KDD 2024 version); the authors' code averages over blocks of tensors instead of comparing whole models.
    """

    every: int = 1

    def __post_init__(self) -> None:
        require_at_least("every", self.every, 1)

    @property
    def name(self) -> str:
        return "similarity"

    def note(self, number: int, exchanges: Sequence[Exchange], scene: RunContext) -> Note | None:
        if number % self.every or len(exchanges) < 2:
            return None
        rows = torch.stack([one.uploaded[: scene.task.layout.trainable] for one in exchanges])
        return Note({"uploaded": float(mean_cosine_similarity(rows))})

    def settle(self, value: Any, method: Algorithm, integers: Tensor, scene: RunContext) -> Any:
        return {**value, "pool": method.diagnose().get("pool_cosine")}

    def result(self, series: Series, tensors: Mapping[int, Mapping[str, Tensor]], scene: RunContext) -> dict[str, Any]:
        """`pool` holds None for the rounds in which the method had none, and is left out where it never had one."""
        found = {"kind": "similarity", "rounds": [number for number, _ in series]}
        pool = [value["pool"] for _, value in series]
        found["uploaded"] = [value["uploaded"] for _, value in series]
        return found if all(value is None for value in pool) else found | {"pool": pool}
