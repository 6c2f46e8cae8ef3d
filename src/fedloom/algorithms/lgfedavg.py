"""LG-FedAvg: local representations below, a shared top."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedloom.algorithm import algorithms
from fedloom.algorithms.sharing import PartlyShared, block_layers
from fedloom.config.fields import Count


@algorithms.register("lg_fedavg")
@dataclass
class LgFedAvg(PartlyShared):
    """FedAvg over the highest blocks of the model; each client keeps its own representation below.

    Both train together.
    Source: Liang et al. 2020 (Think locally, act globally), algorithm 1.
    Use it when clients' inputs differ and labels mean the same everywhere: each client has features of its own.

    Args:
        global_blocks: Number of blocks that travel; blocks are those that the model declares, else its layers.
    """

    global_blocks: Count = 1

    def private(self, module: nn.Module) -> frozenset[str]:
        return block_layers(module, slice(None, -self.global_blocks))
