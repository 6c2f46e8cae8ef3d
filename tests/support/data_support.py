"""Data sets by name, and the bytes of small pictures and arrays, for the tests of data."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from fedloom.common.expression import Call
from fedloom.data.dataset import Dataset, datasets


def make(name: str, **options: Any) -> Dataset:
    """Return the data set of a name and its options."""
    dataset: Dataset = datasets.build(Call(name, named=options))
    return dataset


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    """Return random bytes of a shape."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def picture(pixels: np.ndarray, form: str = "PNG") -> bytes:
    """Return the file of a picture. `pixels`: H x W, or H x W x 3."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def idx_bytes(array: np.ndarray) -> bytes:
    """Return an idx file of an array of bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()
