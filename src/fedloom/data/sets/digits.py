"""scikit-learn's handwritten digits: the data set that needs no file and no network."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.sets.holdout import hold_out

_SPLIT_SEED = 0  # fixed, so that results on digits compare between runs of every seed


@datasets.register("digits")
def digits(*, test_fraction: float = 0.2) -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels, bundled with scikit-learn (10 classes).

    Inputs `[n, 1, 8, 8]` float32: the counts 0..16 of each pixel over 16, which float32 holds exactly.

    Args:
        test_fraction: Of every class floor((1 - test_fraction) n) images train and the others test, whatever the seed.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (its test part).
    """
    pixels, labels = _bundled()
    images = torch.from_numpy(pixels).to(torch.float32).div_(16).view(-1, 1, 8, 8)
    samples = Samples(images, torch.from_numpy(labels))
    train, test = hold_out(samples, test_fraction, _SPLIT_SEED, within=samples.labels)
    return Dataset("digits", train, test, classes=10, class_names=tuple("0123456789"))


def _bundled() -> tuple[NDArray[Any], NDArray[Any]]:
    """Read pixels `[n, 64]` and labels `[n]` from scikit-learn's file: importing it takes as long as importing PyTorch."""
    package = find_spec("sklearn")
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz" if package and package.origin else None
    if file is not None and file.is_file():
        table = np.loadtxt(file, delimiter=",", dtype=np.int64)
        return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    source = load_digits()
    return source.data, source.target.astype(np.int64)
