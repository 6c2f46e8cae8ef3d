"""A site's own samples: from a function that it names, or from arrays in a folder or file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedloom.data.dataset import Dataset, Samples
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.sets.own import call_source, own_samples, parts_of, triple
from fedloom.errors import DataError


def own_data(source: str) -> tuple[Samples, Samples | None]:
    """The samples that a site trains on, and those that it tests on where it sets some aside.

    `source` is `module:function`, called without arguments, or the path of a folder of npy files or of an npz file with the
    arrays inputs and labels, and perhaps test_inputs and test_labels. A function returns (inputs, labels), NumPy or torch, or two
    such pairs, or `Samples`, two of them, or a `Dataset`. Raises `DataError` naming the source and what is wrong, and
    `InvalidValue` where there is no such function.
    """
    if ":" in source and not Path(source).exists():
        train, *rest = _called(source)
    else:
        arrays = [(inputs, labels, None) for inputs, labels, _ in parts_of(read_arrays(Path(source)), source)]
        train, *rest = own_samples(arrays, "channels_first", source)
    if not len(train):
        raise DataError(f"{source}: no samples to train on")
    test = rest[0] if rest and len(rest[0]) else None
    if test is not None and (test.inputs.shape[1:], test.inputs.dtype) != (train.inputs.shape[1:], train.inputs.dtype):
        raise DataError(f"{source}: samples for testing look different from those for training")
    return train, test


def _called(source: str) -> list[Samples]:
    given = call_source(source)
    if isinstance(given, Dataset):
        return [given.train, given.test]
    pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], (tuple, Samples))
    parts = list(given) if pair else [given]
    if all(isinstance(part, Samples) for part in parts):
        return [replace(part, groups=None) for part in parts]
    return own_samples([triple(part, source) for part in parts], "channels_first", source)
