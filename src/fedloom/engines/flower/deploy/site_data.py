"""A site's own samples: from a function that it names, or from arrays in a folder or file."""

from __future__ import annotations

from pathlib import Path

from fedloom.data.dataset import Dataset, Samples
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.sets.own import call_source, own_samples, triple
from fedloom.errors import DataError

_KEYS = ("inputs", "labels", "test_inputs", "test_labels")


def own_data(source: str) -> tuple[Samples, Samples | None]:
    """The samples that a site trains on, and those that it tests on where it sets some aside.

    `source` is `module:function`, called without arguments, or the path of a folder of npy files or of an npz file with the
    arrays inputs and labels, and perhaps test_inputs and test_labels. A function returns (inputs, labels), NumPy or torch, or two
    such pairs, or `Samples`, two of them, or a `Dataset`. Raises `DataError` naming the source and what is wrong, and
    `InvalidValue` where there is no such function.
    """
    parts = _called(source) if ":" in source and not Path(source).exists() else _read(Path(source))
    train, *rest = parts
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
    parts = list(given) if isinstance(given, tuple) and len(given) == 2 and _is_part(given[0]) else [given]
    if all(isinstance(part, Samples) for part in parts):
        return [Samples(part.inputs, part.labels) for part in parts]
    return own_samples([triple(part, source) for part in parts], "channels_first", source)


def _is_part(value: object) -> bool:
    return isinstance(value, (tuple, Samples))


def _read(path: Path) -> list[Samples]:
    found = read_arrays(path)
    wanted = _KEYS if any(key.startswith("test_") for key in found) else _KEYS[:2]
    missing = [key for key in wanted if key not in found]
    if missing:
        raise DataError(f"{path}: no array {missing[0]!r} (it has: {', '.join(sorted(found)) or 'none'})")
    pairs = [wanted[place : place + 2] for place in range(0, len(wanted), 2)]
    return own_samples([(found[inputs], found[labels], None) for inputs, labels in pairs], "channels_first", str(path))
