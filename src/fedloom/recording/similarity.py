"""Similarity of a round's models (FedMR, figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.fields import Count
from fedloom.flat.population import mean_cosine_similarity
from fedloom.recording.recorder import ClientExchange, Measurement, Recorder, RunContext, Series, Tensors, recorders


@recorders.register("similarity")
@dataclass(frozen=True)
class Similarity(Recorder):
    """Mean cosine similarity of the models that the clients upload and, where the method keeps a pool, of the pool.

    The mean of w_i . w_j / (|w_i| |w_j|) over all pairs i < j, of the trainable parameters, for the models `uploaded` in the
    round and, for methods with a pool of models (FedMR, Indep), of the `pool` after the round. Recorded in every round whose
    number `every` divides and in which two models or more were uploaded. Source: Hu et al. 2022 (FedMR), figure 5 (figure 6 in
    the KDD 2024 version); the authors' code averages over blocks of tensors instead of comparing whole models.
    """

    every: Count = 1

    def measure(self, number: int, exchanges: Sequence[ClientExchange], context: RunContext) -> Measurement | None:
        if number % self.every or len(exchanges) < 2:
            return None
        rows = torch.stack([exchange.uploaded[: context.task.layout.trainable] for exchange in exchanges])
        return Measurement({"uploaded": float(mean_cosine_similarity(rows))})

    def complete(self, value: Any, method: Algorithm, integers: Tensor, context: RunContext) -> Any:
        return {**value, "pool": method.diagnose().get("pool_cosine")}

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        """Return the values by name; `pool` is None for rounds without a pool, and left out where there never was one."""
        curves = super().result(series, tensors, context)
        return {name: values for name, values in curves.items() if name != "pool" or any(v is not None for v in values)}
