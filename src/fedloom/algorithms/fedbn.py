"""FedBN: batch-norm layers stay with each client."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedloom.algorithm import algorithms
from fedloom.algorithms.sharing import PartlyShared
from fedloom.errors import InvalidValue


@algorithms.register("fedbn")
@dataclass
class FedBN(PartlyShared):
    """FedAvg over everything but the batch-norm layers, whose parameters and statistics stay with each client.

    A model without batch-norm layers is refused: there it is FedAvg.
    Source: Li et al. 2021 (FedBN), algorithm 1.
    Use it when clients' inputs look different (other devices, other sites) and the model has batch norm.
    """

    def private(self, module: nn.Module) -> frozenset[str]:
        layers = frozenset(n for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        if not layers:
            raise InvalidValue(f"fedbn keeps batch-norm layers, and {type(module).__name__} has none: use fedavg")
        return layers
