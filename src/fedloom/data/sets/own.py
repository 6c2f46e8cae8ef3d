"""The user's own data: arrays in files, folders of pictures, or a Python function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.config.fields import Count
from fedloom.config.plugins import found_at
from fedloom.data.dataset import Dataset, Samples, datasets, same_names
from fedloom.data.formats.labels import class_labels
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.formats.pictures import class_folders, pictures, read_image_folder
from fedloom.data.sets.holdout import hold_out
from fedloom.data.sets.normalisation import Normalise, image_dataset
from fedloom.data.sets.origin import Parts, cached_files
from fedloom.errors import DataError, InvalidValue, one_line, quoted, shortened, suggestion

_KEYS = ("inputs", "labels", "groups", "test_inputs", "test_labels", "test_groups")
_MOST_CLASSES = 1_000_000  # a label beyond this is a mistake, such as an id in place of a class

Layout = Literal["channels_first", "channels_last"]


@datasets.register("arrays")
def arrays(
    *,
    path: str = "",
    classes: int | None = None,
    layout: Layout = "channels_first",
    normalise: Normalise = "standard",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Arrays of your own: an npz file, or a folder of npy files, named inputs, labels and optionally groups (the client
    of each sample), test_inputs, test_labels, test_groups.

    Inputs: uint8 pictures `[n, h, w]` or `[n, channels, h, w]` (`layout="channels_last"`: `[n, h, w, channels]`), float
    features of any shape, or integer tokens `[n, tokens]`; labels: integers 0..classes-1 (`classes=None`: up to the
    highest). Without test arrays `test_fraction` of each class is held out at random by `seed`. Pickled objects in the
    files are refused. Raises `DataError` naming the file and what is wrong.
    """
    if not path:
        raise InvalidValue("arrays needs path: an npz file or a folder of npy files (inputs, labels, ...)")
    found = read_arrays(Path(path))
    for key in found:
        if key not in _KEYS:
            near = suggestion(key, _KEYS)
            raise DataError(f"{path}: unknown array {quoted(key)}{near} (there may be: {', '.join(_KEYS)})")
    train, *rest = own_samples(parts_of(found, path), layout, path)
    return own_dataset("arrays", train, rest[0] if rest else None, classes, normalise, test_fraction, seed, path)


@datasets.register("images")
def images(
    *,
    folder: str = "",
    channels: Literal[1, 3] = 3,
    size: Count | None = None,
    normalise: Normalise = "standard",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Folders of pictures of your own: `train/<class>/*.png` and `test/<class>/*.png`, or `<class>/*.png` alone, of which
    `test_fraction` of each class is held out at random by `seed`.

    Classes are the folders of the training part in alphabetical order. `channels` 3 (colour) or 1 (grey); `size` scales
    every picture to size x size, without it all must have one size. Decoded pictures are kept in the cache folder.
    "standard" uses the figures of the training pictures. Raises `DataError` naming the file and what is wrong.
    """
    root = Path(folder)
    if not folder or not root.is_dir():
        raise DataError(
            f"{folder or 'images'}: no such folder (wanted: <class>/<picture>, in train/ and test/ or alone)"
        )
    first = root / "train" if (root / "train").is_dir() else root
    names = class_folders(first)
    if len(names) < 2:
        raise DataError(f"{first}: {len(names)} class folders, at least 2 are needed")
    second = root / "test" if first != root and (root / "test").is_dir() else None
    extent = None if size is None else (size, size)
    parts = [first] if second is None else [first, second]
    files = [path for part in parts for name in class_folders(part) for path in pictures(part / name)]

    def read() -> Parts:
        train = read_image_folder(first, names, channels, extent)
        # The cache holds two parts; a part that is not there stays empty.
        return train, train[:0] if second is None else read_image_folder(second, names, channels, extent)

    train, test = cached_files("images", f"{channels} {size} {names}", files, read)
    if second is None:
        train, test = hold_out(train, test_fraction, seed, within=train.labels)
    elif train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise DataError(f"{second}: pictures of another size than in {first}; set size to scale them")
    return image_dataset("images", (train, test), len(names), normalise, None, names)


@datasets.register("python")
def python(
    *,
    source: str = "",
    classes: int | None = None,
    layout: Layout = "channels_first",
    normalise: Normalise = "standard",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Data from a function of your own: `source="my_package.data:load"`, called without arguments.

    It returns (inputs, labels) or (inputs, labels, client ids), of which `test_fraction` of each class is held out; or
    two such tuples, for training and test; or a `Dataset`. Arrays are as in the data set `arrays`, from NumPy or torch.
    A module is looked for among the installed ones and in the current folder. Raises `InvalidValue` if the function is not
    found, and `DataError` if it fails or returns something else.
    """
    given = call_source(source)
    if isinstance(given, Dataset):
        return given
    pair = isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, tuple) for part in given)
    train, *rest = own_samples([triple(part, source) for part in (given if pair else (given,))], layout, source)
    return own_dataset("python", train, rest[0] if rest else None, classes, normalise, test_fraction, seed, source)


def parts_of(found: Mapping[str, Any], path: Path | str) -> list[tuple[Any, Any, Any]]:
    """(inputs, labels, client ids or None) for training and, where there are arrays for it, for testing. Raises `DataError`
    for an array that is missing."""
    prefixes = ("", "test_") if any(key.startswith("test_") for key in found) else ("",)
    for key in (f"{prefix}{name}" for prefix in prefixes for name in ("inputs", "labels")):
        if key not in found:
            raise DataError(f"{path}: no array {key!r} (it has: {shortened(', '.join(sorted(found))) or 'none'})")
    return [(found[f"{one}inputs"], found[f"{one}labels"], found.get(f"{one}groups")) for one in prefixes]


def triple(part: object, source: str) -> tuple[Any, Any, Any]:
    """(inputs, labels, client ids or None) of what a function returned. Raises `DataError` for anything else."""
    if not isinstance(part, tuple) or len(part) not in (2, 3):
        what = f"{len(part)} values" if isinstance(part, tuple) else f"a {type(part).__name__}"
        raise DataError(
            f"{source}: returned {what}; wanted (inputs, labels[, client ids]), or two of these, or a Dataset"
        )
    return part[0], part[1], part[2] if len(part) == 3 else None


def call_source(source: str) -> Any:
    """What the function named by `source` returns. Raises `DataError`, in one line, for whatever it raises."""
    function = found_at(source, "source", "'module:function'")
    try:
        return function()
    except Exception as error:
        raise DataError(f"{source}: raised {one_line(f'{type(error).__name__}: {error}')}") from error


def own_samples(parts: Sequence[tuple[Any, Any, Any]], layout: Layout, source: str) -> list[Samples]:
    """Samples of each part, (inputs, labels, client ids or None), NumPy or torch, checked.

    uint8 inputs become pictures `[n, channels, h, w]` from `[n, h, w]` or, with `layout="channels_last"`, from
    `[n, h, w, channels]`; floats float32; other integers int64 tokens. Client ids, of any type that sorts, become 0, 1,
    ... in sorted order, the same in every part. Raises `DataError` naming `source`.
    """
    found = [_checked(part, layout, source) for part in parts]
    ids = [part.groups for part in found if part.groups is not None]
    known = torch.cat(ids).unique() if ids else torch.empty(0)
    with _from(source):
        return [
            part if part.groups is None else replace(part, groups=torch.searchsorted(known, part.groups))
            for part in same_names(*found)
        ]


def _checked(arrays: tuple[Any, Any, Any], layout: Layout, source: str) -> Samples:
    inputs, labels, groups = (array.detach().cpu().numpy() if isinstance(array, Tensor) else array for array in arrays)
    if inputs is None or labels is None:
        raise DataError(f"{source}: inputs and labels are both needed")
    with _from(source):
        inputs = np.asarray(inputs)
        if inputs.dtype == np.uint8 and inputs.ndim not in (3, 4):
            raise DataError(
                f"{source}: uint8 inputs are pictures of 3 or 4 dimensions, not of shape {list(inputs.shape)}"
            )
        if inputs.dtype == np.uint8 and inputs.ndim == 4 and layout == "channels_last":
            inputs = inputs.transpose(0, 3, 1, 2)
        made = Samples(inputs, class_labels(labels, _MOST_CLASSES, source), groups)
    if made.inputs.dtype == torch.int64 and (made.inputs.dim() != 2 or (made.inputs < 0).any()):
        raise DataError(
            f"{source}: integer inputs are tokens [n, tokens] of at least 0, not of shape {list(inputs.shape)}"
        )
    if not len(made):
        raise DataError(f"{source}: no samples")
    return made


@contextmanager
def _from(source: str) -> Iterator[None]:
    """`DataError`, which names the source, in the place of `InvalidValue`."""
    try:
        yield
    except InvalidValue as error:
        raise DataError(f"{source}: {error}") from None


def own_dataset(
    name: str,
    train: Samples,
    test: Samples | None,
    classes: int | None,
    normalise: Normalise,
    test_fraction: float,
    seed: int,
    source: str,
) -> Dataset:
    """The data set of `train` and `test`; without `test`, of each class `test_fraction` is held out."""
    if test is None:
        train, test = hold_out(train, test_fraction, seed, within=train.labels)
    highest = int(max(part.labels.max() for part in (train, test) if len(part)))
    with _from(source):
        made = image_dataset(name, (train, test), classes or highest + 1, normalise)
    if train.inputs.dtype != torch.int64:
        return made
    size = int(max(part.inputs.max() for part in (train, test) if len(part))) + 1
    return replace(made, vocabulary=size)
