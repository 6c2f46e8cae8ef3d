"""SiloBN, FedBN, FedPer, LG-FedAvg: FedAvg of which some layers or statistics stay with each client."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedloom.algorithm import algorithms
from fedloom.algorithms.sharing import PartlyShared, block_layers
from fedloom.config.fields import Count
from fedloom.errors import InvalidValue


@algorithms.register("silobn")
@dataclass
class SiloBN(PartlyShared):
    """FedAvg whose batch-norm statistics stay with each client, while scale and shift are averaged.

    For a model without floating-point buffers this is FedAvg; FedALA's code trains its FedAvg so.
    `buffers=average` is FedAvg for every model. Source: Andreux et al. 2020, section 3.
    Use it when sites measure on different devices and the model has batch norm, but scale and shift should be common.
    """


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


@algorithms.register("fedper")
@dataclass
class FedPer(PartlyShared):
    """FedAvg over the base of the model; the highest blocks stay with each client and train with it.

    Source: Arivazhagan et al. 2019, algorithm 1.
    Use it when clients agree on features and differ in labels or in what labels mean; it sends less than FedAvg.

    Args:
        personal_blocks: Number of blocks that stay; blocks are those that the model declares, else its layers.
    """

    personal_blocks: Count = 1

    def private(self, module: nn.Module) -> frozenset[str]:
        return block_layers(module, slice(-self.personal_blocks, None))


@algorithms.register("lg_fedavg")
@dataclass
class LgFedAvg(PartlyShared):
    """FedAvg over the highest blocks of the model; each client keeps its own representation below. Both train together.

    Source: Liang et al. 2020 (Think locally, act globally), algorithm 1.
    Use it when clients' inputs differ and labels mean the same everywhere: each client has features of its own.

    Args:
        global_blocks: Number of blocks that travel; blocks are those that the model declares, else its layers.
    """

    global_blocks: Count = 1

    def private(self, module: nn.Module) -> frozenset[str]:
        return block_layers(module, slice(None, -self.global_blocks))
