"""What a data set is: tensors of samples, and a description that models and reports need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.config.registry import Registry
from fedloom.errors import InvalidValue
from fedloom.objectives import Objective, on_device
from fedloom.objectives.classification import CLASSIFICATION


@dataclass(frozen=True)
class DataSpec:
    """Shape of one sample as the model sees it (`(channels, height, width)`, `(features,)` or `(tokens,)`), how many numbers a
    model puts out (the classes, or the columns of the target), and for token data the size of the vocabulary."""

    shape: tuple[int, ...]
    outputs: int
    vocabulary: int | None = None


@dataclass(frozen=True)
class Samples:
    """`inputs [n, ...]` (uint8 images, float features or int64 tokens), `labels [n]` int64 or whatever targets `[n, ...]` the
    objective learns, and for data with natural clients `groups [n]`, the client (writer, user) each sample came from, from 0."""

    inputs: Tensor
    labels: Tensor
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise InvalidValue(f"{len(self.inputs)} inputs but {len(self.labels)} labels")
        if self.groups is not None and len(self.groups) != len(self.labels):
            raise InvalidValue(f"{len(self.groups)} client ids but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Samples:
        """The same samples on `device`."""
        groups = None if self.groups is None else self.groups.to(device)
        return Samples(self.inputs.to(device), self.labels.to(device), groups)

    def __getitem__(self, index: Tensor | slice) -> Samples:
        return Samples(self.inputs[index], self.labels[index], None if self.groups is None else self.groups[index])

    def concatenate(self, other: Samples) -> Samples:
        """These samples followed by `other` (groups are kept only when both have them)."""
        groups = None
        if self.groups is not None and other.groups is not None:
            groups = torch.cat([self.groups, other.groups])
        return Samples(torch.cat([self.inputs, other.inputs]), torch.cat([self.labels, other.labels]), groups)


@dataclass(frozen=True)
class Dataset:
    """Training and test samples of one named set.

    uint8 images stay bytes in memory, laid out `[n, channels, height, width]`; `prepare` scales them to [0, 1] and then
    normalises with `mean` and `std`, one figure a channel, on the device that trains. `classes` is 0 where targets are no
    classes. Raises `InvalidValue` where the objective cannot learn the targets.
    """

    name: str
    train: Samples
    test: Samples
    classes: int = 0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    vocabulary: int | None = None
    class_names: tuple[str, ...] | None = None
    objective: Objective = CLASSIFICATION

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            self.objective.require_targets(part.labels)

    @property
    def spec(self) -> DataSpec:
        """What a model must know of this data."""
        outputs = self.objective.outputs(self.train.labels, self.classes, self.vocabulary)
        return DataSpec(tuple(self.train.inputs.shape[1:]), outputs, self.vocabulary)

    def prepare(self, inputs: Tensor) -> Tensor:
        """A batch as the model takes it: bytes to normalised float32, everything else unchanged."""
        if inputs.dtype != torch.uint8:
            return inputs
        scaled = inputs.to(torch.float32).div_(255)
        if self.mean is None or self.std is None:
            return scaled
        shape = (1, -1, *([1] * (inputs.dim() - 2)))
        mean, std = on_device(self.mean, inputs.device), on_device(self.std, inputs.device)
        return scaled.sub_(mean.view(shape)).div_(std.view(shape))


# A data set is a function of keyword parameters (every one with a default) that returns a `Dataset`.
datasets: Registry[Callable[..., Dataset]] = Registry("data set", "fedloom.data.sets")
