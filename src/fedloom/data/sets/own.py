"""The user's own data: arrays in files, folders of pictures, or a Python function."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile

from fedloom.config.plugins import found_at
from fedloom.data.dataset import Dataset, datasets
from fedloom.data.formats.images import class_folders, pictures, read_image_folder
from fedloom.data.sets.holdout import hold_out
from fedloom.data.sets.normalisation import check_normalise, image_dataset
from fedloom.data.sets.origin import Parts, cached_files
from fedloom.data.sets.samples import own_dataset, own_samples
from fedloom.errors import DataError, InvalidValue, suggestion

_KEYS = ("inputs", "labels", "groups", "test_inputs", "test_labels", "test_groups")
_COLOURS = {1: "grey", 3: "colour"}


@datasets.register("arrays")
def arrays(
    *,
    path: str = "",
    classes: int | None = None,
    layout: str = "channels_first",
    normalise: str = "standard",
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
    check_normalise(normalise)
    if not path:
        raise InvalidValue("arrays needs path: an npz file or a folder of npy files (inputs, labels, ...)")
    found = read_arrays(Path(path))
    for key in found:
        if key not in _KEYS:
            near = suggestion(key, _KEYS)
            raise DataError(f"{path}: unknown array {key!r}{near and ':'}{near} (there may be: {', '.join(_KEYS)})")
    for key in ("inputs", "labels", *(("test_inputs", "test_labels") if any("test_" in key for key in found) else ())):
        if key not in found:
            raise DataError(f"{path}: no array {key!r} (it has: {', '.join(sorted(found)) or 'none'})")
    triples = [(found["inputs"], found["labels"], found.get("groups"))]
    if "test_inputs" in found:
        triples.append((found["test_inputs"], found["test_labels"], found.get("test_groups")))
    train, *rest = own_samples(triples, layout, path)
    return own_dataset("arrays", train, rest[0] if rest else None, classes, normalise, test_fraction, seed, path)


@datasets.register("images")
def images(
    *,
    folder: str = "",
    channels: int = 3,
    size: int | None = None,
    normalise: str = "standard",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Folders of pictures of your own: `train/<class>/*.png` and `test/<class>/*.png`, or `<class>/*.png` alone, of which
    `test_fraction` of each class is held out at random by `seed`.

    Classes are the folders of the training part in alphabetical order. `channels` 3 (colour) or 1 (grey); `size` scales
    every picture to size x size, without it all must have one size. Decoded pictures are kept in the cache folder.
    "standard" uses the figures of the training pictures. Raises `DataError` naming the file and what is wrong.
    """
    check_normalise(normalise)
    if channels not in _COLOURS:
        raise InvalidValue(f"channels must be 3 (colour) or 1 (grey), not {channels}")
    if size is not None and size < 1:
        raise InvalidValue(f"size must be at least 1 pixel, not {size}")
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
    layout: str = "channels_first",
    normalise: str = "standard",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Data from a function of your own: `source="my_package.data:load"`, called without arguments.

    It returns (inputs, labels) or (inputs, labels, client ids), of which `test_fraction` of each class is held out; or
    two such tuples, for training and test; or a `Dataset`. Arrays are as in the data set `arrays`, from NumPy or torch.
    A module is looked for among the installed ones and in the current folder. Raises `InvalidValue` if the function is not
    found, and `DataError` if it fails or returns something else.
    """
    check_normalise(normalise)
    given = call_source(source)
    if isinstance(given, Dataset):
        return given
    pair = isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, tuple) for part in given)
    train, *rest = own_samples([triple(part, source) for part in (given if pair else (given,))], layout, source)
    return own_dataset("python", train, rest[0] if rest else None, classes, normalise, test_fraction, seed, source)


def read_arrays(path: Path) -> dict[str, Any]:
    """The arrays of an npz file or of the npy files in a folder, by name."""
    try:
        if path.is_dir():
            return {file.stem: np.load(file, allow_pickle=False) for file in sorted(path.glob("*.npy"))}
        with path.open("rb") as file:  # NumPy leaves a file of its own open when the archive is damaged
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, NpzFile):
                raise DataError(f"{path}: a single array; wanted an npz file or a folder of npy files")
            with found as stored:
                return {key: stored[key] for key in stored.files}
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged or not an npz or npy file ({' '.join(str(error).split())})") from error


def triple(part: object, source: str) -> tuple[Any, Any, Any]:
    """(inputs, labels, client ids or None) of what a function returned. Raises `DataError` for anything else."""
    if not isinstance(part, tuple) or len(part) not in (2, 3):
        what = f"{len(part)} values" if isinstance(part, tuple) else f"a {type(part).__name__}"
        raise DataError(
            f"{source}: returned {what}; wanted (inputs, labels[, client ids]), or two of these, or a Dataset"
        )
    return part[0], part[1], part[2] if len(part) == 3 else None


def call_source(source: str) -> Any:
    """What the function named by `source` returns; any failure of it is the user's to mend, told in one line."""
    function = found_at(source, "source", "'module:function'")
    try:
        return function()
    except Exception as error:
        raise DataError(f"{source}: raised {type(error).__name__}: {' '.join(str(error).split())}") from error
