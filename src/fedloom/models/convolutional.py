"""The small image models of the papers: two convolutions, each with ReLU and 2x2 max pooling, then
fully connected layers.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.shapes import image_shape

Variant = Literal["auto", "cifar", "femnist"]


class Convolutional(nn.Module):
    """`conv1` and `conv2`, each with max pooling, a ReLU layer for each width in `hidden`, then
    `head`.
    """

    def __init__(
        self,
        name: str,
        spec: DataSpec,
        *,
        filters: tuple[int, int],
        kernel: int,
        padding: int,
        hidden: Sequence[int],
    ) -> None:
        super().__init__()
        channels, *sides = image_shape(name, spec, least=4 if padding else 16)
        for _ in range(2):
            sides = [(side + 2 * padding - kernel + 1) // 2 for side in sides]
        self.conv1 = nn.Conv2d(channels, filters[0], kernel, padding=padding)
        self.conv2 = nn.Conv2d(filters[0], filters[1], kernel, padding=padding)
        self.hidden = (
            ("fc",) if len(hidden) == 1 else tuple(f"fc{i + 1}" for i in range(len(hidden)))
        )
        features = filters[1] * prod(sides)
        for layer, size in zip(self.hidden, hidden, strict=True):
            self.add_module(layer, nn.Linear(features, size))
            features = size
        self.head = nn.Linear(features, spec.outputs)

    def forward(self, x: Tensor) -> Tensor:
        # ReLU commutes with the maximum, and has a quarter of the work after pooling.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2)).flatten(1)
        for layer in self.hidden:
            x = F.relu(getattr(self, layer)(x))
        logits: Tensor = self.head(x)
        return logits


@models.register("digits_cnn")
def digits_cnn(spec: DataSpec) -> nn.Module:
    """Small CNN for the built-in 8x8 digits (13,706 parameters): 3x3 convolutions of 16 and 32
    channels, a layer of 64.
    """
    return Convolutional("digits_cnn", spec, filters=(16, 32), kernel=3, padding=1, hidden=(64,))


@models.register("mcmahan_cnn")
def mcmahan_cnn(spec: DataSpec) -> nn.Module:
    """McMahan's CNN: padded 5x5 convolutions of 32 and 64 channels, a layer of 512 (1,663,370
    parameters on MNIST).

    Source: McMahan et al. 2017, section 3.
    """
    return Convolutional("mcmahan_cnn", spec, filters=(32, 64), kernel=5, padding=2, hidden=(512,))


@models.register("cnn4")
def cnn4(spec: DataSpec) -> nn.Module:
    """FedALA's four-layer CNN: 5x5 convolutions of 32 and 64 channels, a layer of 512 (582,026
    parameters on MNIST).

    Needs images of at least 16x16.

    Source: FedALA, section "Experiments".
    """
    return Convolutional("cnn4", spec, filters=(32, 64), kernel=5, padding=0, hidden=(512,))


@models.register("fedmr_cnn")
def fedmr_cnn(spec: DataSpec, *, variant: Variant = "auto") -> nn.Module:
    """FedMR's CNN: LeNet-5 for colour (62,006 parameters on CIFAR-10), a wider one for grey images
    (160,510 on FEMNIST).

    Needs images of at least 16x16.

    Args:
        variant: `cifar` has convolutions of 6 and 16 channels and layers of 120 and 84; `femnist`
            has convolutions of 16 and 32 and a layer of 256; `auto` is `femnist` for images of one
            channel, else `cifar`.

    Returns:
        A module from `[b, channels, h, w]` to logits `[b, Y]`.

    Source: the code of FedMR; its text describes `mcmahan_cnn`.
    """
    if is_femnist(variant, image_shape("fedmr_cnn", spec)[0]):
        return Convolutional(
            "fedmr_cnn", spec, filters=(16, 32), kernel=5, padding=0, hidden=(256,)
        )
    return Convolutional("fedmr_cnn", spec, filters=(6, 16), kernel=5, padding=0, hidden=(120, 84))


@models.register("feddc_cnn")
def feddc_cnn(spec: DataSpec) -> nn.Module:
    """FedDC's CNN: two 5x5 convolutions of 64 channels, layers of 384 and 192 (797,962 parameters
    on CIFAR-10).

    Needs images of at least 16x16.

    Source: FedUmf, appendix.
    """
    return Convolutional(
        "feddc_cnn", spec, filters=(64, 64), kernel=5, padding=0, hidden=(384, 192)
    )


def is_femnist(variant: Variant, channels: int) -> bool:
    """Return True for FedMR's FEMNIST model, False for its CIFAR model.

    Args:
        variant: `femnist`, `cifar` or `auto`, which decides by the channels.
        channels: Number of channels of a sample: 1 for grey images.

    Returns:
        The decision for `auto`: one channel means FEMNIST.
    """
    return channels == 1 if variant == "auto" else variant == "femnist"
