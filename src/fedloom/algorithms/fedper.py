"""FedPer: the top of the model stays with each client."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedloom.algorithm import algorithms
from fedloom.algorithms.sharing import PartlyShared, block_layers
from fedloom.config.fields import Count


@algorithms.register("fedper")
@dataclass
class FedPer(PartlyShared):
    """FedAvg over the base of the model; the highest blocks stay with each client and train with it.

    Base and personal blocks train together.
    Source: Arivazhagan et al. 2019, algorithm 1.
    Use it when clients agree on features and differ in labels or in what labels mean; it sends less than FedAvg.

    Args:
        personal_blocks: Number of blocks that stay; blocks are those that the model declares, else its layers.
    """

    personal_blocks: Count = 1

    def private(self, module: nn.Module) -> frozenset[str]:
        return block_layers(module, slice(-self.personal_blocks, None))
