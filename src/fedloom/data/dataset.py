"""Data sets: tensors of samples, and a description for models and reports."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedloom.common.description import Described
from fedloom.common.errors import InvalidValue, quoted, suggestion
from fedloom.common.expression import Call
from fedloom.common.randomness import stream
from fedloom.common.registry import Registry
from fedloom.data.convert import BOOLEANS, Names, as_groups, as_inputs, as_labels
from fedloom.data.lazy import LazyInputs, in_memory
from fedloom.data.preprocessing import (
    Inputs,
    LabelType,
    ModelOutputs,
    PictureInputs,
    Preprocessing,
    TensorInputs,
    label_type,
    normalised,
)
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.metrics import NamedMetric
from fedloom.objectives.regression import Standardised


@dataclass(frozen=True)
class DataSpec:
    """The data as a model needs to know them.

    Attributes:
        shape: One sample: `(channels, height, width)`, `(features,)` or `(tokens,)`.
        outputs: The number of a model's outputs: classes, or columns of the target.
        vocabulary: Of token data, the number of tokens.
    """

    shape: tuple[int, ...]
    outputs: int
    vocabulary: int | None = None


@dataclass(frozen=True, init=False, repr=False)
class Samples(Described):
    """Inputs, targets and perhaps clients of n samples.

    Each may be a tensor, a NumPy array, a list or a column of a table, of any type of number: whole
    numbers become int64, floats float32 (tensors keep float64). Labels and groups may be text,
    which is numbered in alphabetical order.

    Args:
        inputs: `[n, ...]`: uint8 images, float features or int64 tokens; `LazyInputs` for a data
            set larger than memory.
        labels: `[n]` int64, or other targets `[n, ...]` that the objective learns.
        groups: The client (writer, user) of each sample, `[n]`, for data with natural clients.
        label_names: The text of label k.
        group_names: The text of group k.

    Raises:
        InvalidValue: For values that cannot be learned from, with the field.
    """

    inputs: Tensor
    labels: Tensor
    groups: Tensor | None = None
    label_names: Names | None = None
    group_names: Names | None = None

    def __init__(
        self, inputs: Any, labels: Any, groups: Any = None, label_names: Names | None = None,
        group_names: Names | None = None,
    ) -> None:  # fmt: skip
        inputs = inputs if isinstance(inputs, LazyInputs) else as_inputs(inputs)
        labels, label_texts = as_labels(labels)
        groups, group_texts = (None, None) if groups is None else as_groups(groups)
        for kind, values in (("inputs", inputs), ("client ids", groups)):
            if values is not None and len(values) != len(labels):
                raise InvalidValue(
                    f"{len(values)} {kind} but {len(labels)} labels: give one for each sample"
                )
        names = {
            "label_names": label_texts or label_names,
            "group_names": group_texts or group_names,
        }
        vars(self).update(inputs=inputs, labels=labels, groups=groups, **names)

    def __len__(self) -> int:
        return len(self.labels)

    def summary(self) -> str:
        """Return the number of samples and the shape of one, such as `360 samples of [1, 8, 8]`."""
        return f"{len(self):,} samples of {list(self.inputs.shape[1:])}"

    def _description(self) -> dict[str, str]:
        lines = {
            "inputs": f"{list(self.inputs.shape)} {_type_name(self.inputs)}",
            "labels": f"{list(self.labels.shape)} {_type_name(self.labels)}",
        }
        if self.label_names is not None:
            lines["label names"] = _listed(self.label_names)
        if self.groups is not None:
            lines["groups"] = f"{len(self.groups.unique()):,}"
        if self.group_names is not None:
            lines["group names"] = _listed(self.group_names)
        return lines

    def to(self, device: torch.device) -> "Samples":
        """Return the samples on `device`."""
        return self._each(lambda values: values.to(device))

    def __getitem__(self, index: Tensor | slice) -> "Samples":
        return self._each(lambda values: values[index])

    def _each(self, change: Callable[[Any], Any]) -> "Samples":
        groups = None if self.groups is None else change(self.groups)
        return replace(self, inputs=change(self.inputs), labels=change(self.labels), groups=groups)

    def concatenate(self, samples: "Samples") -> "Samples":
        """Return these samples followed by `samples`; groups stay only if both have them."""
        a, b = same_names(self, samples)
        groups = None if a.groups is None or b.groups is None else torch.cat([a.groups, b.groups])
        inputs = torch.cat([a.inputs, b.inputs])
        labels = torch.cat([a.labels, b.labels])
        return Samples(
            inputs, labels, groups, a.label_names, None if groups is None else a.group_names
        )


def _type_name(values: Any) -> str:
    return str(values.dtype).removeprefix("torch.")


def _listed(names: Sequence[str], most: int = 10) -> str:
    """Return the first names, and the number of all if there are more."""
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed}, ... ({len(names):,} in total)"


def hold_out(
    samples: Samples, fraction: float, seed: int, *, within: Tensor | None = None
) -> tuple[Samples, Samples]:
    """Split samples at random into training and test samples, the same share of each group.

    Args:
        samples: `n` samples.
        fraction: Share of the test samples, in (0, 1).
        seed: Seed of the draw.
        within: Groups `[n]`, by default the classes.

    Returns:
        Training and test samples, each in the order of `samples`.

    Raises:
        InvalidValue: The fraction is not in (0, 1).
    """
    if not 0 < fraction < 1:
        raise InvalidValue(f"test_fraction must be between 0 and 1, not {fraction}")
    total = len(samples)
    if within is None:
        classes = samples.labels.dtype == torch.int64 and samples.labels.dim() == 1
        within = samples.labels if classes else torch.zeros(total)
    groups = torch.unique(within, return_inverse=True)[1]
    shuffled = torch.randperm(total, generator=stream(seed, "hold out"))
    order = shuffled[groups[shuffled].argsort(stable=True)]
    sizes = torch.bincount(groups)
    # The small addition keeps a product such as 0.29 * 100 = 28.999999999999996 from losing a
    # sample.
    trained = [max(1, math.floor((1 - fraction) * size + 1e-9)) for size in sizes.tolist()]
    rank = torch.arange(total) - (sizes.cumsum(0) - sizes)[groups[order]]
    training = torch.empty(total, dtype=torch.bool)
    training[order] = rank < torch.tensor(trained, dtype=torch.long)[groups[order]]
    return samples[training], samples[~training]


def in_two(splits: Sequence[Samples], fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Return training and test samples with names numbered alike.

    Args:
        splits: Training and test samples, or samples of which a share is held out.
        fraction: Share that is held out, in (0, 1).
        seed: Seed of the draw.

    Returns:
        Training and test samples.
    """
    train, test = splits if len(splits) > 1 else hold_out(splits[0], fraction, seed)
    train, test = same_names(train, test)
    return train, test


def same_names(*splits: Samples) -> tuple[Samples, ...]:
    """Return the samples with labels and groups of text numbered alike in all of them.

    Args:
        splits: Parts of one data set. In each, text has been numbered by its own ranks.

    Returns:
        The parts in the same order. A number stands for the same text in all of them.

    Raises:
        InvalidValue: Labels or groups are text in one part and numbers in another.
    """
    for kind in ("label", "group"):
        naming = {
            getattr(split, f"{kind}_names")
            for split in splits
            if getattr(split, f"{kind}s") is not None
        }
        if None in naming and len(naming) > 1:
            raise InvalidValue(
                f"{kind}s are text in one part of the data and numbers in another: give one kind"
            )
        if len(naming) > 1:
            names = tuple(sorted(set().union(*naming)))
            splits = tuple(_renumbered(split, kind, names) for split in splits)
    return splits


def _renumbered(samples: Samples, kind: str, names: Names) -> Samples:
    numbers = getattr(samples, f"{kind}s")
    texts = getattr(samples, f"{kind}_names")
    if numbers is None or texts == names:
        return samples
    position = {name: index for index, name in enumerate(names)}
    if strange := [name for name in texts if name not in position]:
        near = suggestion(strange[0], list(names))
        raise InvalidValue(f"{kind}s: {quoted(strange[0])} is none of the {len(names)} names{near}")
    ranks = numbers.new_tensor([position[name] for name in texts], dtype=torch.int64)
    fields: dict[str, Any] = {f"{kind}s": ranks[numbers], f"{kind}_names": names}
    return replace(samples, **fields)


@dataclass(frozen=True, repr=False)
class Dataset(Described):
    """Training and test samples of a named set.

    Args:
        name: The name in reports.
        train: Training samples, which a partition shares out among clients.
        test: Test samples, perhaps none.
        classes: The number of classes. By default one more than the highest label of an objective
            that learns classes (0 for another); labels that do not begin at 0, or have gaps so that
            fewer than a tenth is present, are then numbered from there in their order.
        mean: The mean of each channel, pixels in [0, 1]; `prepare` normalises uint8 images `[n,
            channels, height, width]` by it.
        std: The deviation of each channel.
        vocabulary: Of token data, the number of tokens.
        class_names: The name of each class, by default its original label.
        objective: The objective that is learned.
        metrics: Recorded beside the objective's figures.
        encoding: The encoding that made the inputs of a table or of texts. `make_task` fits the
            encoding of a table.
        standardise: Bring the target of a `regression` to mean 0 and deviation 1, over the samples
            that clients train on.
        target: The name of the column or quantity that is learned.
        label_type: Type of the labels and of predictions: `text`, `number` or `boolean`; by
            default found by the samples.
        notices: A line for each decision of a reader that the user may not expect.

    Raises:
        InvalidValue: For training and test samples that do not fit each other, or targets that the
            objective cannot learn.
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
    metrics: tuple[NamedMetric, ...] = ()
    encoding: Inputs | None = None
    standardise: bool = True
    target: str = ""
    label_type: LabelType = ""
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kinds = [
            f"{list(samples.inputs.shape[1:])} {samples.inputs.dtype}"
            for samples in (self.train, self.test)
        ]
        if kinds[0] != kinds[1] and len(self.test):
            raise InvalidValue(
                f"inputs for training are {kinds[0]}, those for testing {kinds[1]}: give both alike"
            )
        train, test = same_names(self.train, self.test)
        vars(self).update(train=train, test=test)
        if self.objective.classes:
            self._number_labels()
        for samples in (self.train, self.test):
            self.objective.require_targets(samples.labels)

    def _description(self) -> dict[str, str]:
        lines = {
            "name": self.name,
            "metric": self.objective.metric.name,
            "train": self.train.summary(),
            "test": self.test.summary(),
        }
        if self.target:
            lines["target"] = self.target
        if self.class_names:
            lines["classes"] = _listed(self.class_names)
        elif self.classes:
            lines["classes"] = str(self.classes)
        if self.train.groups is not None:
            lines["groups"] = f"{len(self.train.groups.unique()):,}"
        return lines

    def _number_labels(self) -> None:
        """Fill in `classes` and `class_names`, and let labels be 0 .. classes - 1."""
        splits = [self.train, self.test]
        names = self.class_names
        vars(self).update(label_type=self.label_type or self._label_type())
        if self.train.label_names is not None:
            names = names or self.train.label_names
            splits = [_renumbered(samples, "label", names) for samples in splits]
        labels = [samples.labels for samples in splits if len(samples)]
        if any(values.dim() != 1 or values.dtype != torch.int64 for values in labels):
            return  # for `require_targets` to refuse
        classes = self.classes or (0 if self.train.label_names is None else len(names or ()))
        if labels:
            present = torch.cat(labels).unique()
            lowest = int(present[0])
            highest = int(present[-1])
            if lowest == _IGNORED and not (present[1:] < 0).any():
                remedy = "leave these samples out, or take objective='segmentation' or 'next_token'"
                raise InvalidValue(
                    f"labels contain {_IGNORED}, which PyTorch's losses ignore: {remedy}"
                )
            if classes and not 0 <= lowest <= highest < classes:
                outlier = highest if highest >= classes else lowest
                raise InvalidValue(
                    f"labels must be 0 to {classes - 1}, and {outlier} is among them: without "
                    "classes, they are numbered from 0"
                )
            if not classes and (lowest or highest + 1 > _SPARSE * len(present)):
                ranks = [torch.searchsorted(present, samples.labels) for samples in splits]
                splits = [replace(s, labels=rank) for s, rank in zip(splits, ranks, strict=True)]
                names = names or tuple(map(str, present.tolist()))
                highest = len(present) - 1
            classes = classes or highest + 1
        vars(self).update(train=splits[0], test=splits[1], classes=classes, class_names=names)

    def _label_type(self) -> LabelType:
        texts = self.train.label_names
        if texts is None:
            return "number" if self.class_names is None else label_type(self.class_names)
        return "boolean" if texts == BOOLEANS else "text"

    @property
    def spec(self) -> DataSpec:
        """The description of the data for a model."""
        outputs = self.objective.outputs(self.train.labels, self.classes, self.vocabulary)
        return DataSpec(tuple(self.train.inputs.shape[1:]), outputs, self.vocabulary)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return a batch as the model takes it: bytes as normalised float32, other inputs
        unchanged.
        """
        return normalised(
            in_memory(inputs),
            None if self.mean is None or self.std is None else (self.mean, self.std),
        )

    @property
    def preprocessing(self) -> Preprocessing:
        """The way from a person's data to a model's inputs and from its outputs to answers; of a
        task, with all figures.
        """
        encoding = self.encoding
        inputs = self.train.inputs
        objective = self.objective
        shape = tuple(inputs.shape[1:])
        if encoding is None and inputs.dtype == torch.uint8:
            encoding = PictureInputs(shape, self.mean or (), self.std or ())
        elif encoding is None:
            encoding = TensorInputs(shape, str(inputs.dtype).removeprefix("torch."))
        classes = self.spec.outputs if objective.answer in ("class", "classes", "pixel") else 0
        names = self.class_names or tuple(map(str, range(classes)))
        kind = self.label_type if objective.answer == "class" else ""
        scale: tuple[tuple[float, ...], ...] = ((), ())
        if isinstance(objective, Standardised):
            scale = tuple(objective.mean), tuple(objective.deviation)
        return Preprocessing(
            encoding, ModelOutputs(objective.answer, self.target, names, kind, *scale)
        )


# the label of samples that PyTorch's losses ignore
_IGNORED = -100


# labels of which at least this many times more are absent than present are numbered anew
_SPARSE = 10

# A data set is a function of keyword parameters (every one with a default) that returns a
# `Dataset`.
datasets: Registry[Callable[..., Dataset]] = Registry("data set", "fedloom.data.sets")


def make_dataset(expression: str | Call) -> Dataset:
    """Return the data set of an expression such as `digits` or `synthetic(1, 1)`."""
    return cast(Dataset, datasets.build(expression))
