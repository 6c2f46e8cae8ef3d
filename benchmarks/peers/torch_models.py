"""The models as plain PyTorch modules, with the same start in every PyTorch framework."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
        )  # fmt: skip


class Cnn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10),
        )  # fmt: skip


class PflCnn(nn.Sequential):
    """A network of the size of pfl-research's CIFAR-10 model.

    It has two 3x3 convolutions, a pool and a layer of 128.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2304, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip


class PFLlibCnn(nn.Sequential):
    """The network of PFLlib for MNIST: two 5x5 convolutions with pools, and a layer of 512."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
        )  # fmt: skip


MODELS: dict[str, type[nn.Module]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "pfl": PflCnn,
    "pfllib": PFLlibCnn,
}


def model(workload: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[workload]()


@torch.no_grad()
def loss_of(module: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    module.eval()
    return float(F.cross_entropy(module(inputs), labels))
