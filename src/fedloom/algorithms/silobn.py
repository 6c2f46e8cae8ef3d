"""SiloBN: federated averaging whose batch-norm statistics stay where they were measured."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.algorithm import algorithms
from fedloom.algorithms.sharing import PartlyShared


@algorithms.register("silobn")
@dataclass
class SiloBN(PartlyShared):
    """FedAvg whose batch-norm statistics stay with each client, while scale and shift are averaged.

    For a model without floating-point buffers this is FedAvg; FedALA's code trains its FedAvg so.
    `buffers=average` is FedAvg for every model. Source: Andreux et al. 2020, section 3.
    Use it when sites measure on different devices and the model has batch norm, but scale and shift should be common.
    """
