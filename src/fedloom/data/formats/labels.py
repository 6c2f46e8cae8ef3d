"""The check of labels that every reader makes."""

from collections.abc import Sequence, Sized
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.errors import DataError


def class_labels(values: npt.ArrayLike | Sequence[object], classes: int, path: Path | str) -> Tensor:
    """Return `values [n]` as int64 labels; raises `DataError`, with the row, unless all are integers 0..classes-1."""
    nested = isinstance(values, list) and any(isinstance(value, Sized) for value in values)  # may unfold to any size
    labels = np.empty(0) if nested else np.asarray(values)
    if labels.ndim != 1 or labels.dtype.kind not in "biu":
        raise DataError(f"{path}: labels must be a list of integers")
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        row = int(outside[0])
        raise DataError(f"{path}: label {labels[row]} in row {row} is outside 0..{classes - 1}")
    return torch.from_numpy(labels.astype(np.int64))
