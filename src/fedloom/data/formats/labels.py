"""The check every reader makes of the labels it read."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.formats.limits import reading
from fedloom.errors import DataError


def class_labels(values: npt.ArrayLike | Sequence[object], classes: int, path: Path | str) -> Tensor:
    """`values [n]` as int64 labels; raises `DataError`, naming `path` and the row, unless all are integers 0..classes-1."""
    if isinstance(values, list) and any(isinstance(value, Sized) for value in values):  # which may unfold to any size
        raise DataError(f"{path}: labels must be a list of integers, not of lists or text")
    with reading(path, "labels are not a list of integers"):
        found = np.asarray(values)
    if found.ndim != 1 or not (np.issubdtype(found.dtype, np.integer) or found.dtype == np.bool_):
        shape = list(found.shape)
        raise DataError(f"{path}: labels must be a list of integers, not an array of {found.dtype} of shape {shape}")
    outside = np.flatnonzero((found < 0) | (found >= classes))
    if len(outside):
        row = int(outside[0])
        raise DataError(f"{path}: label {found[row]} in row {row} is outside 0..{classes - 1}")
    return torch.from_numpy(found.astype(np.int64))


def same_length(inputs: int, labels: int, path: Path | str) -> None:
    """Raise `DataError` unless there is one label for each input."""
    if inputs != labels:
        raise DataError(f"{path}: {inputs} inputs but {labels} labels")
