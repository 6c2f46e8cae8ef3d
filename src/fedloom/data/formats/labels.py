"""Checks of labels that every reader makes."""

from collections.abc import Sequence, Sized
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.formats.limits import reading
from fedloom.errors import DataError


def class_labels(values: npt.ArrayLike | Sequence[object], classes: int, path: Path | str) -> Tensor:
    """Return `values [n]` as int64 labels; raises `DataError`, with the row, unless all are integers 0..classes-1."""
    if isinstance(values, list) and any(isinstance(value, Sized) for value in values):  # they may unfold to any size
        raise DataError(f"{path}: labels must be a list of integers, not of lists or text")
    with reading(path, "labels are not a list of integers"):
        labels = np.asarray(values)
    if labels.ndim != 1 or not (np.issubdtype(labels.dtype, np.integer) or labels.dtype == np.bool_):
        shape = list(labels.shape)
        raise DataError(f"{path}: labels must be a list of integers, not an array of {labels.dtype} of shape {shape}")
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        row = int(outside[0])
        raise DataError(f"{path}: label {labels[row]} in row {row} is outside 0..{classes - 1}")
    return torch.from_numpy(labels.astype(np.int64))


def same_length(inputs: int, labels: int, path: Path | str) -> None:
    """Raise `DataError` unless there is one label for each input."""
    if inputs != labels:
        raise DataError(f"{path}: {inputs} inputs but {labels} labels")
