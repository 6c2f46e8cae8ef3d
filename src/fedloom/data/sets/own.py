"""Data of the user's own: arrays in files, folders of pictures, or a Python function."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.common.errors import DataError, InvalidValue, one_line, quoted, shortened, suggestion
from fedloom.common.fields import Count
from fedloom.common.plugins import found_at
from fedloom.data.convert import class_labels
from fedloom.data.dataset import Dataset, Samples, datasets, in_two, same_names
from fedloom.data.formats.limits import reading
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.formats.pictures import class_folders, pictures, visible_files
from fedloom.data.sets.normalisation import Normalise, Split, image_dataset
from fedloom.data.sets.origin import cached_split
from fedloom.data.sets.picture_files import read_image_folder, read_labelled

_KEYS = ("inputs", "labels", "groups", "test_inputs", "test_labels", "test_groups")
_MOST_CLASSES = 1_000_000  # a label beyond this is a mistake, such as an id in place of a class

Layout = Literal["channels_first", "channels_last"]
Arrays = tuple[Any, Any, Any]
"""Inputs, labels, and client ids or None."""


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
    """Arrays of your own: `inputs`, `labels` and optionally `groups` (the client of each sample),
    and the same with `test_`.

    Inputs are uint8 pictures `[n, h, w]` or `[n, channels, h, w]`, float features of any shape, or
    integer tokens `[n, tokens]`; labels are integers 0..classes-1.

    Args:
        path: An npz file, or a folder of npy files. Pickled objects in them are refused.
        classes: The number of classes, by default one more than the highest label.
        layout: `channels_last` reads pictures `[n, h, w, channels]`.
        normalise: `standard` takes mean and deviation of the training pictures, by channel.
        test_fraction: Without test arrays, the share of each class that is held out, in (0, 1).
        seed: The seed of the samples held out.

    Returns:
        Samples with the inputs of the file. Tokens are int64, pictures `[n, channels, h, w]` uint8.

    Raises:
        DataError: For a file that is missing, damaged or too large, or arrays that do not fit.
    """
    if not path:
        raise InvalidValue(
            "arrays needs path: an npz file or a folder of npy files (inputs, labels, ...)"
        )
    by_name = read_arrays(Path(path))
    for key in by_name:
        if key not in _KEYS:
            near = suggestion(key, _KEYS)
            raise DataError(
                f"{path}: unknown array {quoted(key)}{near} (there may be: {', '.join(_KEYS)})"
            )
    samples = own_samples(split_arrays(by_name, path), layout, path)
    return _dataset("arrays", samples, classes, normalise, test_fraction, seed, path)


@datasets.register("images")
def images(
    *,
    folder: str = "",
    by_client: bool = False,
    channels: Literal[1, 3] = 3,
    size: Count | None = None,
    normalise: Normalise = "standard",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Folders of pictures of your own: `train/<class>/*.png` and `test/<class>/*.png`, or
    only `<class>/*.png`, in folders of any depth.

    Pictures are shown upright by their EXIF orientation. Grey levels of 16 bits are divided by 257,
    floats from 0 to 1 multiplied by 255; other pictures of 32 bits are refused.

    Classes are the folders of the training pictures in alphabetical order. Decoded pictures are
    saved in the cache folder.

    Args:
        folder: The folder.
        by_client: There is a folder for each client around the folders of its classes:
            `<client>/<class>/*.png`, perhaps below `train` and `test`. The clients are the groups
            for `partition = "natural"`.
        channels: 3 (colour) or 1 (grey).
        size: Scale every picture to size x size; without it all must have one size.
        normalise: `standard` takes mean and deviation of the training pictures, by channel.
        test_fraction: Without `test`, the share of each class that is held out, in (0, 1).
        seed: The seed of the pictures held out.

    Returns:
        Pictures `[n, channels, h, w]` uint8, and labels from 0 in the order of the class names.

    Raises:
        DataError: For a folder without classes, or a picture that is unreadable or of another size.
    """
    root = Path(folder)
    if not folder or not root.is_dir():
        raise DataError(
            f"{folder or 'images'}: no such folder (expected <class>/<picture>, perhaps in "
            "train/ and test/)"
        )
    folders = [root / "train" if (root / "train").is_dir() else root]
    if folders[0] != root and (root / "test").is_dir():
        folders.append(root / "test")
    extent = None if size is None else (size, size)
    reader = _read_clients if by_client else _read_classes
    splits, names, notices = reader(root, folders, channels, extent)
    train, test = in_two(splits, test_fraction, seed)
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise DataError(
            f"{folders[1]}: pictures of another size than in {folders[0]}; set size to scale them"
        )
    dataset = image_dataset("images", (train, test), len(names), normalise, None, names)
    return replace(dataset, notices=tuple(notices))


_Pictures = tuple[Sequence[Samples], list[str], list[str]]
"""Training and perhaps test samples, the names of their classes, and notices."""


def _read_classes(
    root: Path, folders: Sequence[Path], channels: int, extent: tuple[int, int] | None
) -> _Pictures:
    """Read the pictures of folders with a folder for each class."""
    names = class_folders(folders[0])
    if len(names) < 2:
        raise DataError(f"{folders[0]}: {len(names)} class folders, at least 2 are needed")
    with reading(root, "damaged folder of pictures"):
        by_class = {
            split / name: pictures(split / name)
            for split in folders
            for name in class_folders(split)
        }
        files = [path for found in by_class.values() for path in found]
        notices = _unused_files(root, files)
        for name in names:
            if not by_class[folders[0] / name]:
                raise DataError(
                    f"{folders[0] / name}: no pictures of this class: add some, or remove the "
                    "folder"
                )

        def read() -> Split:
            train, *tests = (read_image_folder(split, names, channels, extent) for split in folders)
            return train, tests[0] if tests else train[:0]  # the cache holds two

        size = None if extent is None else extent[0]
        splits = cached_split("images", f"2 {channels} {size} {names}", read, files)
    return splits[: len(folders)], names, notices


def _read_clients(
    root: Path, folders: Sequence[Path], channels: int, extent: tuple[int, int] | None
) -> _Pictures:
    """Read the pictures of folders with a folder for each client, and in it one for each class."""
    with reading(root, "damaged folder of pictures"):
        found = [
            [
                (path, label, client)
                for client in class_folders(split)
                for label in class_folders(split / client)
                for path in pictures(split / client / label)
            ]
            for split in folders
        ]
        names = sorted({label for _, label, _ in found[0]})
        if len(names) < 2:
            raise DataError(
                f"{folders[0]}: pictures of {len(names)} classes in <client>/<class>/<picture>, "
                "at least 2 are needed"
            )
        number = {name: label for label, name in enumerate(names)}
        for path, label, _ in found[-1]:
            if label not in number:
                listed = shortened(", ".join(names))
                raise DataError(
                    f"{path.parent}: no such class among the training images ({listed})"
                )

        def read() -> Split:
            train, *tests = (
                read_labelled([(path, number[label]) for path, label, _ in part], channels, extent)
                for part in found
            )
            return train, tests[0] if tests else train[:0]  # the cache holds two

        files = [path for part in found for path, _, _ in part]
        key = f"2 by client {channels} {extent} {names}"
        splits = cached_split("images", key, read, files)
    with_clients = [
        Samples(samples.inputs, samples.labels, np.array([client for _, _, client in part]))
        for samples, part in zip(splits, found, strict=False)
    ]
    return with_clients, names, _unused_files(root, files)


def _unused_files(root: Path, used: Sequence[Path]) -> list[str]:
    """Return a notice that names the files of a folder of pictures that are not read."""
    unused = sorted({*visible_files(root)} - {*used})
    if not unused:
        return []
    listed = shortened(", ".join(str(path.relative_to(root)) for path in unused))
    return [
        f"{root}: {len(unused)} files are not read, since they are no pictures in a class "
        f"folder: {listed}"
    ]


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

    It returns (inputs, labels), (inputs, labels, client ids) or `Samples`; or two of these, for
    training and test; or a `Dataset`. Arrays are as in the data set `arrays`, from NumPy or torch;
    labels can also be text, whose alphabetical order gives the classes.

    Args:
        source: The function; its module is looked for among the installed ones and in the current
            folder.
        classes: As in `arrays`, as are the following.
        layout: The order of pictures' dimensions.
        normalise: The normalisation of pictures.
        test_fraction: Without test arrays, the share of each class that is held out, in (0, 1).
        seed: The seed of the samples held out.

    Returns:
        The function's `Dataset`, or a data set of its arrays.

    Raises:
        InvalidValue: If there is no such function.
        DataError: If it fails or returns something else.
    """
    data = function_data(source, layout)
    if isinstance(data, Dataset):
        return data
    return _dataset("python", data, classes, normalise, test_fraction, seed, source)


def split_arrays(arrays: Mapping[str, Any], path: Path | str) -> list[Arrays]:
    """Return the arrays for training and, if there are any, for testing.

    Args:
        arrays: Arrays by name, as in the data set `arrays`.
        path: Their file, for errors.

    Returns:
        One or two triples of inputs, labels and groups. Groups may be None.

    Raises:
        DataError: An array is missing.
    """
    prefixes = ("", "test_") if any(key.startswith("test_") for key in arrays) else ("",)
    splits = []
    for prefix in prefixes:
        for key in (f"{prefix}inputs", f"{prefix}labels"):
            if key not in arrays:
                listed = shortened(", ".join(sorted(arrays))) or "none"
                raise DataError(f"{path}: no array {key!r} (it has: {listed})")
        groups = arrays.get(f"{prefix}groups")
        splits.append((arrays[f"{prefix}inputs"], arrays[f"{prefix}labels"], groups))
    return splits


def function_data(source: str, layout: Layout = "channels_first") -> Dataset | Sequence[Samples]:
    """Return the data of a function of the user's.

    Args:
        source: The function, `module:function`.
        layout: Order of the dimensions of pictures.

    Returns:
        The function's data set, or training samples and, if there are any, test samples.

    Raises:
        DataError: The function fails or returns no data.
    """
    data = called(source)
    if isinstance(data, Dataset):
        return data
    is_pair = isinstance(data, tuple) and len(data) == 2
    is_pair = is_pair and all(isinstance(split, tuple | Samples) for split in data)
    splits = data if is_pair else (data,)
    if all(isinstance(split, Samples) for split in splits):
        return same_names(*splits)
    if not all(isinstance(split, tuple) and len(split) in (2, 3) for split in splits):
        kind = f"{len(data)} values" if isinstance(data, tuple) else f"a {type(data).__name__}"
        forms = "(inputs, labels[, client ids]), or two of these, or a Dataset"
        raise DataError(f"{source}: returned {kind}; wanted {forms}")
    return own_samples([(*split, None)[:3] for split in splits], layout, source)


def called(source: str) -> Any:
    """Return the result of the function at `source`, `module:function`. Raises `DataError` if the
    function fails.
    """
    function = found_at(source, "source", "'module:function'")
    try:
        return function()
    except Exception as error:
        raise DataError(
            f"{source}: raised {one_line(f'{type(error).__name__}: {error}')}"
        ) from error


def own_samples(splits: Sequence[Arrays], layout: Layout, source: str) -> Sequence[Samples]:
    """Check arrays to train on, and perhaps to test on.

    Args:
        splits: The arrays.
        layout: Order of the dimensions of pictures.
        source: Name of the data in errors.

    Returns:
        Samples of each split, with text numbered alike.

    Raises:
        DataError: An array has a wrong shape or type.
    """
    with reading(source, "no samples"):
        return same_names(*(_checked(split, layout, source) for split in splits))


def _checked(split: Arrays, layout: Layout, source: str) -> Samples:
    inputs, labels, groups = (
        array.detach().cpu().numpy() if isinstance(array, Tensor) else array for array in split
    )
    inputs = inputs if isinstance(inputs, np.ma.MaskedArray) else np.asarray(inputs)
    shape = list(inputs.shape)
    if inputs.dtype == np.uint8 and inputs.ndim not in (3, 4):
        raise DataError(
            f"{source}: uint8 inputs are pictures of 3 or 4 dimensions, not of shape {shape}"
        )
    if inputs.ndim == 4 and layout == "channels_last":
        inputs = inputs.transpose(0, 3, 1, 2)
    is_text = np.asarray(labels).dtype.kind in "US"
    targets = labels if is_text else class_labels(labels, _MOST_CLASSES, source)
    samples = Samples(inputs, targets, groups)
    tokens = samples.inputs
    if tokens.dtype == torch.int64 and (tokens.dim() != 2 or (tokens < 0).any()):
        raise DataError(
            f"{source}: integer inputs are tokens [n, tokens] of at least 0, not of shape "
            f"{list(inputs.shape)}"
        )
    if not len(samples):
        raise DataError(f"{source}: no samples")
    return samples


def _dataset(
    name: str,
    splits: Sequence[Samples],
    classes: int | None,
    normalise: Normalise,
    share: float,
    seed: int,
    source: str,
) -> Dataset:
    train, test = in_two(splits, share, seed)
    with reading(source, "no samples"):
        named = train.label_names or test.label_names or ()
        highest = len(named) - 1 if named else int(torch.cat([train.labels, test.labels]).max())
        dataset = image_dataset(name, (train, test), classes or highest + 1, normalise)
    if train.inputs.dtype != torch.int64 or not train.inputs.numel():
        return dataset
    highest = int(max(samples.inputs.max() for samples in (train, test) if len(samples)))
    return replace(dataset, vocabulary=highest + 1)
