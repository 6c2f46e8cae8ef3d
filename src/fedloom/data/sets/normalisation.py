"""Normalisation of pictures' bytes: by the set's own mean and deviation, by one half, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedloom.data.dataset import Dataset
from fedloom.data.sets.origin import Split

Scale = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel, pixels in [0, 1]
Normalise = Literal["standard", "half", "none"]
_CHUNK = 8192


def image_dataset(
    name: str,
    split: Split,
    classes: int,
    normalise: Normalise,
    standard: Scale | None = None,
    class_names: Sequence[str] | None = None,
) -> Dataset:
    """Return the data set of training and test samples.

    `normalise="standard"` takes the figures `standard`, by default those of the training images; "half" takes mean and deviation
    0.5, which maps [0, 1] to [-1, 1]; "none" leaves [0, 1].
    """
    train, test = split
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    # `Dataset.prepare` scales bytes alone, so other inputs have nothing to normalise.
    if train.inputs.dtype == torch.uint8 and normalise != "none":
        half = ((0.5,) * train.inputs.shape[1],) * 2
        mean, std = half if normalise == "half" else standard or channel_scale(train.inputs)
    names = None if class_names is None else tuple(class_names)
    return Dataset(name, train, test, classes, mean=mean, std=std, class_names=names)


def channel_scale(images: Tensor) -> Scale:
    """Return mean and standard deviation of each channel of uint8 `images [n, C, ...]`, over 255; 1 for a constant channel."""
    channels = images.shape[1]
    counts = torch.zeros((channels, 256), dtype=torch.float64)
    for start in range(0, len(images), _CHUNK):  # in chunks: counting takes eight bytes a pixel
        chunk = images[start : start + _CHUNK]
        for channel in range(channels):
            counts[channel] += torch.bincount(chunk[:, channel].flatten(), minlength=256)
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True).clamp_min(1)
    mean = share @ values
    deviation = ((share @ values.square()) - mean.square()).clamp_min(0).sqrt()
    deviation[deviation < 1e-9] = 1.0
    return tuple(mean.tolist()), tuple(deviation.tolist())
