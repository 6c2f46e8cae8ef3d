"""The VGG-16 of FedMR's experiments, for CIFAR and for FEMNIST."""

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.common.fields import BelowOne
from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.convolutional import Variant, is_femnist
from fedloom.models.shapes import image_shape


def stage(channels: int, out: int, depth: int) -> nn.Sequential:
    """Return padded 3x3 convolutions, each with batch norm and ReLU.

    Args:
        channels: Input channels.
        out: Output channels.
        depth: Number of convolutions.

    Returns:
        A module from `[b, channels, h, w]` to `[b, out, h, w]`.
    """
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [
            nn.Conv2d(channels if i == 0 else out, out, 3, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


class Vgg16(nn.Module):
    """13 convolutions in five stages with 2x2 max pooling after each, two layers with dropout, then
    `head`.
    """

    def __init__(self, channels: int, pixels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.stages = ("stage1", "stage2", "stage3", "stage4", "stage5")
        self.stage1 = stage(channels, 64, depth=2)
        self.stage2 = stage(64, 128, depth=2)
        self.stage3 = stage(128, 256, depth=3)
        self.stage4 = stage(256, 512, depth=3)
        self.stage5 = stage(512, 512, depth=3)
        self.blocks = tuple((name,) for name in (*self.stages, "fc1", "fc2", "head"))
        self.fc1 = nn.Linear(512 * pixels, 4096)
        self.dropout1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(4096, 4096)
        self.dropout2 = nn.Dropout(dropout)
        self.head = nn.Linear(4096, classes)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.stages:
            x = F.max_pool2d(getattr(self, name)(x), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.dropout1(x)
        x = F.relu(self.fc2(x))
        x = self.dropout2(x)
        logits: Tensor = self.head(x)
        return logits


class FemnistVgg(nn.Module):
    """Five convolutions, average pooling to 7x7, a layer without activation as in FedMR's code,
    then `head`.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 1, padding=1)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.conv4 = nn.Conv2d(128, 256, 3, padding=1)
        self.conv5 = nn.Conv2d(256, 512, 3, padding=1)
        self.fc = nn.Linear(512 * 7 * 7, 256)
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2, stride=1)
        x = F.relu(self.conv3(x))
        x = F.max_pool2d(x, 2, stride=1)
        x = F.relu(self.conv4(x))
        x = F.relu(self.conv5(x))
        x = F.max_pool2d(x, 2)
        x = F.adaptive_avg_pool2d(x, (7, 7)).flatten(1)
        logits: Tensor = self.head(self.fc(x))
        return logits


@models.register("fedmr_vgg16")
def fedmr_vgg16(spec: DataSpec, *, variant: Variant = "auto", dropout: BelowOne = 0.5) -> nn.Module:
    """FedMR's VGG-16 with batch norm (33,646,666 parameters on CIFAR-10); a smaller network for
    FEMNIST.

    Needs images of at least 32x32 (`femnist`: 2x2).

    Args:
        variant: `cifar`, or `femnist` (five convolutions, no batch norm, no dropout: 8,024,958
            parameters at 62 classes); `auto` is `femnist` for images of one channel, else `cifar`.
        dropout: Dropout after each of the two layers of 4096, in [0, 1).

    Returns:
        A module from `[b, channels, h, w]` to logits `[b, Y]`.

    Source: the code of FedMR.
    """
    if is_femnist(variant, image_shape("fedmr_vgg16", spec, least=2)[0]):
        return FemnistVgg(spec.shape[0], spec.outputs)
    channels, height, width = image_shape("fedmr_vgg16", spec, least=32)
    return Vgg16(channels, (height // 32) * (width // 32), spec.outputs, dropout)
