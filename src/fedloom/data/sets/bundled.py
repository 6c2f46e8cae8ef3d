"""Sets that come with scikit-learn, digits and small tables: nothing to download."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.dataset import Dataset, Samples, datasets, hold_out
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.regression import Regression

_SPLIT_SEED = 0  # fixed, so that results compare between runs of every seed


@datasets.register("digits")
def digits(*, test_fraction: float = 0.2) -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels, bundled with scikit-learn (10 classes).

    Inputs `[n, 1, 8, 8]` float32: the counts 0..16 of each pixel over 16, which float32 holds
    exactly.

    Args:
        test_fraction: Of every class floor((1 - test_fraction) n) images train and the others test,
            whatever the seed.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (its test
    part).
    """
    pixels, labels = _bundled()
    images = torch.from_numpy(pixels).to(torch.float32).div_(16).view(-1, 1, 8, 8)
    samples = Samples(images, torch.from_numpy(labels))
    train, test = hold_out(samples, test_fraction, _SPLIT_SEED)
    return Dataset("digits", train, test, classes=10, class_names=tuple("0123456789"))


@datasets.register("diabetes")
def diabetes(*, test_fraction: float = 0.2) -> Dataset:
    """442 patients, 10 measurements each, and how far their diabetes got within a year: a
    regression.

    Inputs and target are standardised by mean and deviation of the training rows, so that a model
    that only knows the mean has an RMSE of about 1.

    Args:
        test_fraction: The share of the rows that tests, whatever the seed.

    Source: Efron, Hastie, Johnstone, Tibshirani, Least Angle Regression, 2004.
    """
    return _table("diabetes", test_fraction, Regression())


@datasets.register("breast_cancer")
def breast_cancer(*, test_fraction: float = 0.2) -> Dataset:
    """569 tumours, 30 measurements each, malignant or benign (2 classes).

    Inputs are standardised by mean and deviation of the training rows.

    Args:
        test_fraction: Of every class floor((1 - test_fraction) n) rows train and the others test,
            whatever the seed.

    Source: Street, Wolberg, Mangasarian, Nuclear feature extraction for breast tumor diagnosis,
    1993.
    """
    return _table("breast_cancer", test_fraction, CLASSIFICATION)


@datasets.register("wine")
def wine(*, test_fraction: float = 0.2) -> Dataset:
    """178 wines, 13 measurements each, from 3 growers (classes).

    Args:
        test_fraction: As in `breast_cancer`, as is the preparation.

    Source: Aeberhard, Forina, Wine, UCI, 1991.
    """
    return _table("wine", test_fraction, CLASSIFICATION)


def _bundled() -> tuple[NDArray[Any], NDArray[Any]]:
    """Read pixels `[n, 64]` and labels `[n]` from scikit-learn's file: importing it takes as long
    as importing PyTorch.
    """
    file = (
        Path(str(getattr(find_spec("sklearn"), "origin", ""))).parent
        / "datasets/data/digits.csv.gz"
    )
    if file.is_file():
        table = np.loadtxt(file, delimiter=",", dtype=np.int64)
        return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def _table(name: str, test_fraction: float, objective: Objective) -> Dataset:
    from sklearn import datasets as sets

    source = getattr(sets, f"load_{name}")()
    inputs = torch.from_numpy(source.data).to(torch.float64)
    targets = torch.from_numpy(source.target)
    targets = targets.long() if objective.classes else targets.to(torch.float64)
    train, test = hold_out(Samples(inputs, targets), test_fraction, _SPLIT_SEED)
    splits = [replace(split, inputs=_scaled(split.inputs, train.inputs)) for split in (train, test)]
    names = None
    if objective.classes:
        names = tuple(map(str, source.target_names))
    else:
        splits = [replace(split, labels=_scaled(split.labels, train.labels)) for split in splits]
    train, test = splits
    return Dataset(
        name, train, test, len(names or ()), class_names=names, objective=objective,
        standardise=False,
    )  # fmt: skip


def _scaled(values: Tensor, training: Tensor) -> Tensor:
    return ((values - training.mean(0)) / training.std(0, correction=0).clamp_min(1e-12)).float()
