"""CIFAR-10 and CIFAR-100 in the two forms their authors offer: Python batches and binary batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.data.dataset import Samples
from fedloom.data.formats.labels import class_labels, same_length
from fedloom.data.formats.pickles import Bytes, read_pickled_arrays
from fedloom.errors import DataError

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


def read_python_batches(paths: Sequence[Path], label_key: str, classes: int) -> Samples:
    """The samples of pickled batches, in the order of `paths`: uint8 images `[n, 3, 32, 32]`.

    A batch is a dictionary with `data` (uint8 `[n, 3072]`: red, green, blue planes, each row by row) and the list
    `label_key` (`labels`, `fine_labels` or `coarse_labels`). Raises `DataError` naming the file and what is wrong.
    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009 ("python version").
    """
    images: list[Bytes] = []
    labels: list[Tensor] = []
    for path in paths:
        batch = read_pickled_arrays(path)
        for key in ("data", label_key):
            if key not in batch:
                raise DataError(f"{path}: no {key!r} in the batch (it has: {', '.join(sorted(batch))})")
        data = batch["data"]
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != _PIXELS:
            shape = list(data.shape) if isinstance(data, np.ndarray) else type(data).__name__
            raise DataError(f"{path}: data must be bytes of shape [n, {_PIXELS}], not {shape}")
        labels.append(class_labels(batch[label_key], classes, path))
        same_length(len(data), len(labels[-1]), path)
        images.append(data)
    return Samples(_images(images), torch.cat(labels))


def read_binary_batches(paths: Sequence[Path], label_bytes: int, label_at: int, classes: int) -> Samples:
    """The samples of binary batches, in the order of `paths`: uint8 images `[n, 3, 32, 32]`.

    A record is `label_bytes` bytes (1 for CIFAR-10; coarse and fine for CIFAR-100), of which `label_at` is the one to
    take, then 3,072 bytes of pixels. Raises `DataError` naming the file and what is wrong.
    Source: A. Krizhevsky, 2009 ("binary version").
    """
    record = label_bytes + _PIXELS
    images: list[Bytes] = []
    labels: list[Tensor] = []
    for path in paths:
        try:
            content = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        if not len(content) or len(content) % record:
            raise DataError(f"{path}: {len(content)} bytes is not a whole number of records of {record} bytes")
        rows = content.reshape(-1, record)
        labels.append(class_labels(rows[:, label_at], classes, path))
        images.append(rows[:, label_bytes:])
    return Samples(_images(images), torch.cat(labels))


def _images(batches: list[Bytes]) -> Tensor:
    """Rows of pixels as one tensor of images. Empties `batches`: each is freed once copied, and the pages of the result
    are only taken as they are written, so the pixels are hardly ever held twice."""
    joined = np.empty((sum(len(batch) for batch in batches), _PIXELS), dtype=np.uint8)
    filled = 0
    while batches:
        batch = batches.pop(0)
        joined[filled : filled + len(batch)] = batch
        filled += len(batch)
    return torch.from_numpy(joined).view(-1, *_SHAPE)
