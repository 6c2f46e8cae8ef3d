"""Arrays of unknown make, checked and brought into the form that `Samples` wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.dataset import Dataset, Samples
from fedloom.data.formats.labels import class_labels, same_length
from fedloom.data.sets.choices import check_choice
from fedloom.data.sets.holdout import hold_out
from fedloom.data.sets.normalisation import image_dataset
from fedloom.errors import DataError

_LAYOUTS = ("channels_first", "channels_last")
_MOST_CLASSES = 1_000_000  # a label beyond this is a mistake, such as an id in place of a class


def own_samples(parts: Sequence[tuple[Any, Any, Any]], layout: str, source: str) -> list[Samples]:
    """Samples of each part, (inputs, labels, client ids or None), NumPy or torch, copied and checked.

    uint8 inputs become pictures `[n, channels, h, w]` from `[n, h, w]` or, with `layout="channels_last"`, from
    `[n, h, w, channels]`; floats float32; other integers int64 tokens. Client ids, of any type that sorts, become 0, 1,
    ... in sorted order, the same in every part. Raises `DataError` naming `source`.
    """
    check_choice("layout", layout, _LAYOUTS)
    found = [_checked(part, layout, source) for part in parts]
    ids = [groups for _, _, groups in found if groups is not None]
    if not ids:
        return [Samples(inputs, labels) for inputs, labels, _ in found]
    if len({groups.dtype.kind for groups in ids}) > 1:
        raise DataError(f"{source}: client ids of different types ({', '.join(str(groups.dtype) for groups in ids)})")
    known = np.unique(np.concatenate(ids))
    return [
        Samples(inputs, labels, None if groups is None else torch.from_numpy(np.searchsorted(known, groups)))
        for inputs, labels, groups in found
    ]


def _checked(arrays: tuple[Any, Any, Any], layout: str, source: str) -> tuple[Tensor, Tensor, Any]:
    inputs, labels, groups = (None if array is None else _numpy(array, source) for array in arrays)
    if inputs is None or labels is None:
        raise DataError(f"{source}: inputs and labels are both needed")
    converted = _inputs(inputs, layout, source)
    same_length(len(converted), len(labels), source)
    if not len(labels):
        raise DataError(f"{source}: no samples")
    if groups is not None and groups.shape != labels.shape:
        raise DataError(f"{source}: {len(labels)} labels but client ids of shape {list(groups.shape)}")
    return converted, class_labels(labels, _MOST_CLASSES, source), groups


def own_dataset(
    name: str,
    train: Samples,
    test: Samples | None,
    classes: int | None,
    normalise: str,
    test_fraction: float,
    seed: int,
    source: str,
) -> Dataset:
    """The data set of `train` and `test`; without `test`, of each class `test_fraction` is held out."""
    if test is None:
        train, test = hold_out(train, test_fraction, seed, within=train.labels)
    elif train.inputs.shape[1:] != test.inputs.shape[1:] or train.inputs.dtype != test.inputs.dtype:
        one, other = (f"{list(part.inputs.shape[1:])} {part.inputs.dtype}" for part in (train, test))
        raise DataError(f"{source}: training inputs are {one}, test inputs {other}")
    highest = int(max(part.labels.max() for part in (train, test) if len(part)))
    if classes is not None and highest >= classes:
        raise DataError(f"{source}: label {highest} is outside 0..{classes - 1}")
    made = image_dataset(name, (train, test), classes or highest + 1, normalise)
    if train.inputs.dtype != torch.int64:
        return made
    size = int(max(part.inputs.max() for part in (train, test) if len(part))) + 1
    return Dataset(name, train, test, made.classes, vocabulary=size)


def _numpy(array: Any, source: str) -> Any:
    found = array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
    if found.dtype.kind not in "biufUS" or found.ndim == 0:
        raise DataError(f"{source}: an array of {found.dtype} of shape {list(found.shape)} is no data")
    return found


def _inputs(found: Any, layout: str, source: str) -> Tensor:
    if found.dtype == np.uint8:
        if found.ndim not in (3, 4):
            raise DataError(
                f"{source}: uint8 inputs are pictures of 3 or 4 dimensions, not of shape {list(found.shape)}"
            )
        pictures = found[:, None] if found.ndim == 3 else found
        if found.ndim == 4 and layout == "channels_last":
            pictures = pictures.transpose(0, 3, 1, 2)
        return torch.from_numpy(pictures.copy())
    if found.dtype.kind == "f":
        if not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found).reshape(len(found), -1).all(1))[0])
            raise DataError(f"{source}: a NaN or infinity in row {row} of the inputs")
        return torch.from_numpy(found.astype(np.float32))
    if found.dtype.kind in "iu":
        if found.ndim != 2 or (found < 0).any():
            raise DataError(
                f"{source}: integer inputs are tokens [n, tokens] of at least 0, not of shape {list(found.shape)}"
            )
        return torch.from_numpy(found.astype(np.int64))
    raise DataError(f"{source}: inputs of {found.dtype} are not read (uint8 pictures, floats or integer tokens)")
