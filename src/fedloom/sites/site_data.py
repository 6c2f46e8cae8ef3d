"""Samples of a site: from a function that it names, or from arrays in a folder or file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedloom.data.dataset import Dataset, Samples
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.sets.own import call_source, own_samples, split_arrays, triple
from fedloom.errors import DataError


def own_data(source: str) -> tuple[Samples, Samples | None]:
    """Return a site's samples for training, and those for testing, None where it sets none aside.

    The source is `module:function`, called without arguments, or the path of a folder of npy files or of an npz file with the
    arrays inputs and labels, and perhaps test_inputs and test_labels. A function returns (inputs, labels), NumPy or torch, or two
    such pairs, or `Samples`, two of them, or a `Dataset`. Raises `DataError` for samples that are missing or do not fit together.
    """
    if ":" in source and not Path(source).exists():
        train, *held_out = _called(source)
    else:
        arrays = [(inputs, labels, None) for inputs, labels, _ in split_arrays(read_arrays(Path(source)), source)]
        train, *held_out = own_samples(arrays, "channels_first", source)
    if not len(train):
        raise DataError(f"{source}: no samples to train on")
    test = held_out[0] if held_out and len(held_out[0]) else None
    if test is not None and (test.inputs.shape[1:], test.inputs.dtype) != (train.inputs.shape[1:], train.inputs.dtype):
        raise DataError(f"{source}: samples for testing look different from those for training")
    return train, test


def _called(source: str) -> list[Samples]:
    data = call_source(source)
    if isinstance(data, Dataset):
        return [data.train, data.test]
    is_pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], (tuple, Samples))
    splits = list(data) if is_pair else [data]
    if all(isinstance(samples, Samples) for samples in splits):
        return [replace(samples, groups=None) for samples in splits]
    return own_samples([triple(samples, source) for samples in splits], "channels_first", source)
