"""Normalisation of pictures: the mean and the standard deviation of each channel."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedloom.data.dataset import Dataset, Samples
from fedloom.data.preprocessing import Scale

Split = tuple[Samples, Samples]
"""Training and test samples."""
Normalise = Literal["standard", "half", "none"]
_CHUNK = 8192


def image_dataset(
    name: str, split: Split, classes: int, normalise: Normalise, standard: Scale | None = None,
    class_names: Sequence[str] | None = None,
) -> Dataset:  # fmt: skip
    """Return the data set of samples, with the scale by which bytes are normalised.

    Args:
        name: The name in reports.
        split: Training and test samples. Inputs that are not bytes have no scale.
        classes: The number of classes.
        normalise: `standard`, `half` (mean and deviation 0.5) or `none`.
        standard: The standard scale, by default computed from the training pictures.
        class_names: The name of each class.

    Returns:
        The data set, with the same samples.
    """
    train, test = split
    scale: Scale | None = None
    if train.inputs.dtype == torch.uint8 and normalise == "half":
        scale = ((0.5,) * train.inputs.shape[1],) * 2
    elif train.inputs.dtype == torch.uint8 and normalise == "standard":
        scale = standard or channel_scale(train.inputs)
    names = None if class_names is None else tuple(class_names)
    mean, std = scale or (None, None)
    return Dataset(name, train, test, classes, mean=mean, std=std, class_names=names)


def channel_scale(images: Tensor) -> Scale:
    """Return mean and standard deviation of each channel of uint8 `images [n, C, ...]`, over 255; 1
    for a constant channel.
    """
    counts = torch.zeros((images.shape[1], 256), dtype=torch.float64)
    for chunk in images.split(_CHUNK):  # counting takes eight bytes a pixel
        planes = [torch.bincount(plane.flatten(), minlength=256) for plane in chunk.unbind(1)]
        counts += torch.stack(planes)
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True).clamp_min(1)
    mean = share @ values
    deviation = ((share @ values.square()) - mean.square()).clamp_min(0).sqrt()
    deviation[deviation < 1e-9] = 1.0
    return tuple(mean.tolist()), tuple(deviation.tolist())
