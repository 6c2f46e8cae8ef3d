"""The ResNet-20 of FedMR's experiments: pre-activation bottlenecks."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.convolutional import Variant, is_femnist
from fedloom.models.resnet import initialise
from fedloom.models.shapes import image_shape


class Bottleneck(nn.Module):
    """`x + F(x)` with `F` three convolutions (1x1, 3x3 with the stride, 1x1), each after batch norm and ReLU.

    `out = 4·planes` channels. Where the shape changes, a 1x1 convolution of `x` itself takes the place of `x`.
    """

    def __init__(self, channels: int, planes: int, stride: int) -> None:
        super().__init__()
        out = 4 * planes
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, planes, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, out, 1, bias=False)
        self.downsample: nn.Conv2d | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Conv2d(channels, out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.conv1(F.relu(self.bn1(x)))
        y = self.conv2(F.relu(self.bn2(y)))
        y = self.conv3(F.relu(self.bn3(y)))
        total: Tensor = y + shortcut
        return total


class PreActivationResNet20(nn.Module):
    """`[n, channels, height, width] -> [n, classes]`: three stages of two bottlenecks, average pooling, `head`.

    `bn` takes no part in the computation. FedMR's code has it, so it is one more unit of recombination, and one more
    tensor of every message, in all of FedMR's figures; its parameters receive no gradient.
    """

    blocks: ClassVar[tuple[tuple[str, ...], ...]] = (("conv1",), ("layer1",), ("layer2",), ("layer3", "bn"), ("head",))

    def __init__(self, channels: int, classes: int, *, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.layer1 = nn.Sequential(Bottleneck(16, 16, 1), Bottleneck(64, 16, 1))
        self.layer2 = nn.Sequential(Bottleneck(64, 32, 2), Bottleneck(128, 32, 1))
        self.layer3 = nn.Sequential(Bottleneck(128, 64, 2), Bottleneck(256, 64, 1))
        self.bn = nn.BatchNorm2d(256)
        self.head = nn.Linear(256, classes)
        initialise(self)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.constant_(layer.weight, 0.5)  # as FedMR's code starts it

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        if self.pooled:
            x = F.max_pool2d(x, 3, stride=1, padding=1)
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@models.register("fedmr_resnet20")
def fedmr_resnet20(spec: DataSpec, *, variant: Variant = "auto") -> nn.Module:
    """FedMR's ResNet-20: six pre-activation bottlenecks (219,482 parameters on CIFAR-10).

    `variant`: `femnist` adds 3x3 max pooling of stride 1 after the first convolution, `cifar` does not; `auto` takes
    `femnist` for images of one channel. The averages over 8x8 (CIFAR) and 7x7 (FEMNIST) pixels are those over the whole
    image. Source: the code of FedMR. Raises `InvalidValue` where the data are no images.
    """
    channels, _, _ = image_shape("fedmr_resnet20", spec)
    return PreActivationResNet20(channels, spec.classes, pooled=is_femnist("fedmr_resnet20", spec, variant))
