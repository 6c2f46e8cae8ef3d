"""scikit-learn's handwritten digits: the data set that needs no file and no network."""

from __future__ import annotations

import torch

from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.sets.holdout import hold_out

_SPLIT_SEED = 0  # fixed, so that results on digits compare between runs of every seed


@datasets.register("digits")
def digits(*, test_fraction: float = 0.2) -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels, bundled with scikit-learn (10 classes).

    Inputs `[n, 1, 8, 8]` float32: the counts 0..16 of each pixel over 16, which float32 holds exactly. Of every class
    floor((1 - test_fraction) n) images train and the others test; the split depends on `test_fraction` alone.
    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (its test part).
    """
    from sklearn.datasets import load_digits  # takes a second, which other data sets need not pay

    source = load_digits()
    images = torch.from_numpy(source.images).to(torch.float32).div_(16).unsqueeze(1)
    samples = Samples(images, torch.from_numpy(source.target).to(torch.long))
    train, test = hold_out(samples, test_fraction, _SPLIT_SEED, within=samples.labels)
    return Dataset("digits", train, test, classes=10, class_names=tuple("0123456789"))
