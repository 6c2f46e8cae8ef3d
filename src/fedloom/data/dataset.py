"""What a data set is: tensors of samples, and a description that models and reports need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom.config.registry import Registry
from fedloom.data.convert import Names, as_groups, as_inputs, as_labels, in_names
from fedloom.data.lazy import LazyInputs, in_memory
from fedloom.errors import InvalidValue
from fedloom.objectives import Objective, on_device
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.metrics import NamedMetric


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
    objective learns, and for data with natural clients `groups [n]`, the client (writer, user) each sample came from.

    Given as tensors, NumPy arrays, lists or columns of a table, of any type of number: whole numbers become int64, floats float32
    (tensors keep float64). Labels and groups may be text, which is numbered in alphabetical order: label k is then
    `label_names[k]`. The inputs of a data set larger than memory are `LazyInputs`. Raises `InvalidValue` naming the field for
    what cannot be learned from.
    """

    inputs: Tensor
    labels: Tensor
    groups: Tensor | None = None
    label_names: Names | None = None
    group_names: Names | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            inputs: Any,
            labels: Any,
            groups: Any = None,
            label_names: Names | None = None,
            group_names: Names | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, LazyInputs):
            object.__setattr__(self, "inputs", as_inputs(self.inputs))
        labels, label_names = as_labels(self.labels)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "label_names", label_names or self.label_names)
        if len(self.inputs) != len(labels):
            raise InvalidValue(f"{len(self.inputs)} inputs but {len(labels)} labels: give one label for each sample")
        if self.groups is not None:
            groups, group_names = as_groups(self.groups)
            object.__setattr__(self, "groups", groups)
            object.__setattr__(self, "group_names", group_names or self.group_names)
            if len(groups) != len(labels):
                raise InvalidValue(f"{len(groups)} client ids but {len(labels)} labels: give one for each sample")

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Samples:
        """The same samples on `device`."""
        groups = None if self.groups is None else self.groups.to(device)
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device), groups=groups)

    def __getitem__(self, index: Tensor | slice) -> Samples:
        groups = None if self.groups is None else self.groups[index]
        return replace(self, inputs=self.inputs[index], labels=self.labels[index], groups=groups)

    def concatenate(self, other: Samples) -> Samples:
        """These samples followed by `other` (groups are kept only when both have them)."""
        one, two = same_names(self, other)
        groups = None if one.groups is None or two.groups is None else torch.cat([one.groups, two.groups])
        inputs, labels = torch.cat([one.inputs, two.inputs]), torch.cat([one.labels, two.labels])
        return Samples(inputs, labels, groups, one.label_names, None if groups is None else one.group_names)


def same_names(*parts: Samples) -> tuple[Samples, ...]:
    """The parts with labels and groups of text numbered alike in all of them."""
    return tuple(_alike(_alike(parts, "labels", "label_names"), "groups", "group_names"))


def _alike(parts: Sequence[Samples], field: str, names_field: str) -> Sequence[Samples]:
    known: list[Names | None] = [getattr(part, names_field) for part in parts if getattr(part, field) is not None]
    if len(set(known)) < 2:
        return parts
    if None in known:
        raise InvalidValue(f"{field} are text in one part of the data and numbers in another: give one kind")
    names = tuple(sorted({name for some in known for name in some or ()}))
    return [_renumbered(part, field, names_field, names) for part in parts]


def _renumbered(part: Samples, field: str, names_field: str, names: Names) -> Samples:
    values = getattr(part, field)
    if values is None:
        return part
    changed: dict[str, Any] = {field: in_names(values, getattr(part, names_field), names, field), names_field: names}
    return replace(part, **changed)


@dataclass(frozen=True)
class Dataset:
    """Training and test samples of one named set.

    uint8 images stay bytes in memory, laid out `[n, channels, height, width]`; `prepare` scales them to [0, 1] and then
    normalises with `mean` and `std`, one figure a channel, on the device that trains. Where the objective learns classes and
    `classes` is not given, it is one more than the highest label; labels that do not begin at 0 are numbered from there in
    their order, and `class_names` keeps what they were. `classes` is 0 where targets are no classes. `standardised` are the
    columns of float inputs `[n, features]` that `make_task` brings to mean 0 and deviation 1 over what the clients train on.
    `metrics` are recorded beside the objective's figures.
    Raises `InvalidValue`, with what to do, where the parts do not fit each other or the objective cannot learn the targets.
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
    standardised: tuple[int, ...] = ()
    metrics: tuple[NamedMetric, ...] = ()

    def __post_init__(self) -> None:
        one, two = (f"{list(part.inputs.shape[1:])} {part.inputs.dtype}" for part in (self.train, self.test))
        if one != two and len(self.test):
            raise InvalidValue(f"inputs for training are {one}, those for testing {two}: give both alike")
        for name, part in zip(("train", "test"), same_names(self.train, self.test), strict=True):
            object.__setattr__(self, name, part)
        if self.objective.classes:
            self._number_labels()
        for part in (self.train, self.test):
            self.objective.require_targets(part.labels)

    def _number_labels(self) -> None:
        """Fill in `classes` and `class_names`, and let labels be 0 .. classes - 1."""
        parts, names = [self.train, self.test], self.class_names
        if self.train.label_names is not None:
            names = names or self.train.label_names
            parts = [_renumbered(part, "labels", "label_names", names) for part in parts]
        labels = [part.labels for part in parts if len(part)]
        if any(one.dim() != 1 or one.dtype != torch.int64 for one in labels):
            return  # for `require_targets` to refuse
        classes = self.classes or (0 if self.train.label_names is None else len(names or ()))
        lowest, highest = (
            int(f(torch.stack([f(one) for one in labels]))) if labels else 0 for f in (torch.min, torch.max)
        )
        if classes and not 0 <= lowest <= highest < classes:
            odd = highest if highest >= classes else lowest
            raise InvalidValue(
                f"labels must be 0 to {classes - 1}, and {odd} is among them: without classes, they are numbered from 0"
            )
        if not classes and lowest:
            present = torch.cat(labels).unique()
            parts = [replace(part, labels=torch.searchsorted(present, part.labels)) for part in parts]
            names, highest = names or tuple(map(str, present.tolist())), len(present) - 1
        found = {
            "train": parts[0],
            "test": parts[1],
            "classes": classes or highest + bool(labels),
            "class_names": names,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def spec(self) -> DataSpec:
        """What a model must know of this data."""
        outputs = self.objective.outputs(self.train.labels, self.classes, self.vocabulary)
        return DataSpec(tuple(self.train.inputs.shape[1:]), outputs, self.vocabulary)

    def prepare(self, inputs: Tensor) -> Tensor:
        """A batch as the model takes it: bytes to normalised float32, everything else unchanged."""
        inputs = in_memory(inputs)
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
