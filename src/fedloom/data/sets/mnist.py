"""MNIST and the sets that share its format: Fashion-MNIST and EMNIST."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.idx import read_idx
from fedloom.data.formats.labels import class_labels, same_length
from fedloom.data.sets.normalisation import Normalise, Scale, image_dataset
from fedloom.data.sets.origin import Origin, Parts, Tables, files_named, load
from fedloom.errors import DataError

_DIGITS = tuple("0123456789")
_LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CLOTHES = ("T-shirt/top", *["trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag"], "ankle boot")
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@datasets.register("mnist")
def mnist(*, folder: str | None = None, hub: bool | None = None, normalise: Normalise = "standard") -> Dataset:
    """MNIST: handwritten digits, 60,000 and 10,000 images `[1, 28, 28]`, 10 classes.

    Read from the four idx files (plain or gz) or parquet; "standard" is mean 0.1307, deviation 0.3081.
    """
    folders = ("MNIST", "mnist")
    scale: Scale = ((0.1307,), (0.3081,))
    return _idx_set("mnist", folders, "ylecun/mnist", scale, _DIGITS, folder, hub, normalise)


@datasets.register("fashion_mnist")
def fashion_mnist(*, folder: str | None = None, hub: bool | None = None, normalise: Normalise = "standard") -> Dataset:
    """Fashion-MNIST: pieces of clothing, 60,000 and 10,000 images `[1, 28, 28]`, 10 classes.

    Read from the four idx files (plain or gz) or parquet; "standard" is mean 0.2860, deviation 0.3530.
    """
    folders = ("FashionMNIST", "fashion_mnist", "fashion-mnist", "fashion")
    scale: Scale = ((0.2860,), (0.3530,))
    return _idx_set("fashion_mnist", folders, "zalando-datasets/fashion_mnist", scale, _CLOTHES, folder, hub, normalise)


@datasets.register("emnist_letters")
def emnist_letters(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
    """EMNIST letters: 124,800 and 20,800 images `[1, 28, 28]` of 26 letters, both cases in one class.

    Labels 1..26 of the files become 0..25; images are turned upright (the files hold them transposed). "standard" uses
    the figures of the training images. Source: Cohen et al., EMNIST, 2017.
    """
    return image_dataset("emnist_letters", _emnist("letters", 26, 1, folder), 26, normalise, None, _LETTERS)


@datasets.register("emnist_l")
def emnist_l(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
    """EMNIST-L: the first ten letters of EMNIST letters, 48,000 and 8,000 images.

    "standard" uses the figures of these training images. Source: FedDC, section 4.1; FedUmf, appendix A.
    """
    train, test = (part[part.labels < 10] for part in _emnist("letters", 26, 1, folder))
    return image_dataset("emnist_l", (train, test), 10, normalise, None, _LETTERS[:10])


@datasets.register("emnist_balanced")
def emnist_balanced(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
    """EMNIST balanced: 112,800 and 18,800 images `[1, 28, 28]` of 47 characters (letters alike in both cases merged).

    Images are turned upright; "standard" uses the figures of the training images. Source: Cohen et al., EMNIST, 2017.
    """
    names = (*_DIGITS, *_LETTERS, *"abdefghnqrt")
    return image_dataset("emnist_balanced", _emnist("balanced", 47, 0, folder), 47, normalise, None, names)


def _idx_set(
    name: str,
    folders: tuple[str, ...],
    repository: str,
    scale: Scale,
    class_names: tuple[str, ...],
    folder: str | None,
    hub: bool | None,
    normalise: Normalise,
) -> Dataset:
    tables = Tables(name, repository, "label", 10, 1)
    parts = load(Origin(name, folders, _wanted(_FILES), _idx_reader(_FILES, 10, tables), tables.fetch), folder, hub)
    return image_dataset(name, parts, 10, normalise, scale, class_names)


def _emnist(split: str, classes: int, first_label: int, folder: str | None) -> Parts:
    kinds = ("images-idx3", "labels-idx1")
    names = [f"emnist-{split}-{part}-{kind}-ubyte" for part in ("train", "test") for kind in kinds]
    read = _idx_reader(names, classes, None, first_label, transposed=True)
    return load(Origin(f"emnist {split}", ("EMNIST", "emnist"), _wanted(names), read), folder, None)


def _wanted(names: Sequence[str]) -> str:
    return ", ".join(f"{name}[.gz]" for name in names)


def _idx_reader(
    names: Sequence[str], classes: int, tables: Tables | None, first_label: int = 0, *, transposed: bool = False
) -> Callable[[Path], Parts | None]:
    """Reads both parts from the idx files `names` (images and labels to train, then to test), or from `tables`."""

    def read(place: Path) -> Parts | None:
        files = files_named(place, names)
        if files is None:
            return None if tables is None else tables.read(place)
        train, test = (_idx_samples(files[at], files[at + 1], classes, first_label, transposed) for at in (0, 2))
        return train, test

    return read


def _idx_samples(images_path: Path, labels_path: Path, classes: int, first_label: int, transposed: bool) -> Samples:
    """Samples of two idx files; `first_label` is the number the files give to class 0."""
    images = _of_dimensions(read_idx(images_path), 3, images_path)
    numbers = _of_dimensions(read_idx(labels_path), 1, labels_path)
    labels = class_labels(numbers.numpy().astype("int64") - first_label, classes, labels_path)
    same_length(len(images), len(labels), images_path)
    upright = images.transpose(1, 2).contiguous() if transposed else images
    return Samples(upright.unsqueeze(1), labels)


def _of_dimensions(found: Tensor, dimensions: int, path: Path) -> Tensor:
    if found.dim() != dimensions:
        shape: Sequence[int] = list(found.shape)
        raise DataError(f"{path}: wanted {dimensions} dimensions, the file has shape {shape}")
    return found.to(torch.uint8)
