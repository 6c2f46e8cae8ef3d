"""Residual networks: ResNet-18 and He's ResNet-20 of basic blocks (He et al. 2016), and FedMR's
ResNet-20 of bottlenecks.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.convolutional import Variant, is_femnist
from fedloom.models.shapes import image_shape


class BasicBlock(nn.Module):
    """`relu(F(x) + shortcut(x))`, with two 3x3 convolutions in `F` and He's shortcut B (`project`)
    or A.
    """

    def __init__(self, channels: int, out: int, stride: int, *, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.stride = stride
        self.added = out - channels
        self.downsample: nn.Sequential | None = None
        if project and (stride != 1 or self.added):
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.stride != 1 or self.added:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.relu(y + x)


def stage(channels: int, out: int, stride: int, *, depth: int, project: bool) -> nn.Sequential:
    """Return a stage of basic blocks. The lowest block changes the number of channels and the
    resolution.

    Args:
        channels: Input channels.
        out: Output channels.
        stride: Stride of the lowest block.
        depth: Number of blocks.
        project: Shortcuts have a convolution (He's option B) instead of padding (A).

    Returns:
        A module from `[b, channels, h, w]` to `[b, out, h / stride, w / stride]`.

    Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016.
    """
    bottom = BasicBlock(channels, out, stride, project=project)
    return nn.Sequential(
        bottom, *(BasicBlock(out, out, 1, project=project) for _ in range(depth - 1))
    )


def initialise(module: nn.Module) -> None:
    """Initialise every convolution by He's normal distribution of variance `2 / fan_out`."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


class ResNet(nn.Module):
    """Stages of `depth` basic blocks, each with half the resolution of the stage below, pooling,
    then `head`.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        widths: Sequence[int],
        *,
        depth: int,
        project: bool,
        large: bool = False,
    ) -> None:
        super().__init__()
        self.large = large
        kernel, stride = (7, 2) if large else (3, 1)
        self.conv1 = nn.Conv2d(
            channels, widths[0], kernel, stride=stride, padding=kernel // 2, bias=False
        )
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages = tuple(f"layer{k + 1}" for k in range(len(widths)))
        for name, below, width in zip(self.stages, (widths[0], *widths), widths, strict=False):
            self.add_module(
                name, stage(below, width, 1 if below == width else 2, depth=depth, project=project)
            )
        self.head = nn.Linear(widths[-1], classes)
        self.blocks = (("conv1", "bn1"), *((name,) for name in self.stages), ("head",))
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        if self.large:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for name in self.stages:
            x = getattr(self, name)(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Bottleneck(nn.Module):
    """`x + F(x)`, with three convolutions (1x1, 3x3 with the stride, 1x1) in `F`, each after batch
    norm and ReLU.
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
    """Three stages of two bottlenecks, average pooling, `head`. `bn` is unused, but FedMR's code
    sends it too.
    """

    blocks: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("conv1",),
        ("layer1",),
        ("layer2",),
        ("layer3", "bn"),
        ("head",),
    )

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
                nn.init.constant_(layer.weight, 0.5)  # the initial value in FedMR's code

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        if self.pooled:
            x = F.max_pool2d(x, 3, stride=1, padding=1)
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@models.register("resnet18")
def resnet18(spec: DataSpec, *, stem: Literal["imagenet", "cifar"] = "imagenet") -> nn.Module:
    """ResNet-18 (11,181,642 parameters at 10 classes).

    Args:
        stem: `imagenet` is a 7x7 convolution of stride 2 and max pooling, as FedALA uses for
            Tiny-ImageNet; `cifar`, for small images, is a 3x3 convolution of stride 1 without
            pooling.

    Returns:
        A module from `[b, channels, h, w]` to logits `[b, Y]`.

    Source: He et al. 2016, table 1.
    """
    channels, _, _ = image_shape("resnet18", spec)
    widths = (64, 128, 256, 512)
    return ResNet(channels, spec.outputs, widths, depth=2, project=True, large=stem == "imagenet")


@models.register("resnet20")
def resnet20(spec: DataSpec) -> nn.Module:
    """He's ResNet-20 for CIFAR: basic blocks with parameter-free shortcuts (269,722 parameters on
    CIFAR-10).

    Source: He et al. 2016, section 4.2.
    """
    channels, _, _ = image_shape("resnet20", spec)
    return ResNet(channels, spec.outputs, (16, 32, 64), depth=3, project=False)


@models.register("fedmr_resnet20")
def fedmr_resnet20(spec: DataSpec, *, variant: Variant = "auto") -> nn.Module:
    """FedMR's ResNet-20: six pre-activation bottlenecks (219,482 parameters on CIFAR-10).

    Its average pooling over 8x8 (CIFAR) or 7x7 (FEMNIST) pixels covers the whole image.

    Args:
        variant: `femnist` adds 3x3 max pooling of stride 1 after `conv1`, `cifar` does not; `auto`
            is `femnist` for images of one channel, else `cifar`.

    Returns:
        A module from `[b, channels, h, w]` to logits `[b, Y]`.

    Source: the code of FedMR.
    """
    channels, _, _ = image_shape("fedmr_resnet20", spec)
    return PreActivationResNet20(channels, spec.outputs, pooled=is_femnist(variant, channels))
