"""MNIST and the sets that share its format: Fashion-MNIST and EMNIST."""

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.data.convert import class_labels
from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.limits import reading, require_room
from fedloom.data.preprocessing import Scale
from fedloom.data.sets.origin import Split, files_named
from fedloom.data.sets.picture_set import Normalise, PictureSet, image_dataset
from fedloom.errors import DataError, quoted

_DIGITS = tuple("0123456789")
_LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CLOTHES = (
    "T-shirt/top",
    *["trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag"],
    "ankle boot",
)
_FILES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


def read_idx(path: Path) -> Tensor:
    """Read the uint8 tensor of an idx file, plain or packed with gzip."""
    # Y. LeCun, C. Cortes, C. Burges, the MNIST database, "file formats"
    with reading(path, "damaged gzip or idx file"), path.open("rb") as file:
        content = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        magic = content.read(4)
        # 8: unsigned bytes, the only element type of these data sets
        if len(magic) < 4 or magic[:3] != b"\0\0\x08":
            raise DataError(
                f"{path}: not an idx file of bytes (it begins with {magic.hex(' ') or 'nothing'})"
            )
        sizes = content.read(4 * magic[3])
        shape = np.frombuffer(sizes, ">u4").tolist()
        count, header = math.prod(shape), 4 + len(sizes)
        require_room(count, path)
        # the tensor shares its memory; nothing beyond is unpacked
        elements = bytearray(content.read(count + 1))
        if len(elements) != count:
            size = f"{header + len(elements)} bytes" + (" or more" if len(elements) > count else "")
            raise DataError(
                f"{path}: {size}, but an idx file of shape {quoted(shape)} has {header + count}"
            )
        return torch.from_numpy(np.frombuffer(elements, np.uint8).reshape(shape))


def _idx_set(
    name: str,
    folders: tuple[str, ...],
    files: Sequence[str],
    classes: int,
    scale: Scale | None = None,
    hub: str = "",
) -> PictureSet:
    def read(folder: Path) -> Split | None:
        if (paths := files_named(folder, files)) is None:
            return None
        train, test = (_idx_samples(paths[k], paths[k + 1], name, classes) for k in (0, 2))
        return train, test

    listed = ", ".join(f"{file}[.gz]" for file in files)
    return PictureSet(name, folders, listed, read, classes, scale, hub, channels=1)


def _idx_samples(images_path: Path, labels_path: Path, name: str, classes: int) -> Samples:
    images, numbers = read_idx(images_path), read_idx(labels_path)
    if images.dim() != 3:
        raise DataError(
            f"{images_path}: wanted 3 dimensions, the file has shape {list(images.shape)}"
        )
    lowest = 1 if name == "emnist_letters" else 0
    labels = class_labels(numbers.numpy().astype("int64") - lowest, classes, labels_path)
    upright = images.transpose(1, 2).contiguous() if name.startswith("emnist") else images
    with reading(images_path, "no pictures"):
        return Samples(upright.unsqueeze(1), labels)


def _emnist(split: str, classes: int) -> PictureSet:
    kinds = ("images-idx3", "labels-idx1")
    files = [f"emnist-{split}-{half}-{kind}-ubyte" for half in ("train", "test") for kind in kinds]
    return _idx_set(f"emnist_{split}", ("EMNIST", "emnist"), files, classes)


_MNIST = _idx_set("mnist", ("MNIST", "mnist"), _FILES, 10, ((0.1307,), (0.3081,)), "ylecun/mnist")
_FASHION = _idx_set(
    "fashion_mnist", ("FashionMNIST", "fashion_mnist", "fashion-mnist", "fashion"), _FILES, 10, ((0.2860,), (0.3530,)),
    "zalando-datasets/fashion_mnist",
)  # fmt: skip
_EMNIST_LETTERS, _EMNIST_BALANCED = _emnist("letters", 26), _emnist("balanced", 47)


@datasets.register("mnist")
def mnist(
    *, folder: str | None = None, hub: bool = False, normalise: Normalise = "standard"
) -> Dataset:
    """MNIST: handwritten digits, 60,000 and 10,000 images `[1, 28, 28]`, 10 classes.

    Args:
        folder: The folder with the four idx files (plain or gz) or parquet.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean 0.1307, deviation 0.3081.

    Source: LeCun, Bottou, Bengio, Haffner, Gradient-based learning applied to document recognition,
    1998.
    """
    return _MNIST.dataset(folder, hub, normalise, _DIGITS)


@datasets.register("fashion_mnist")
def fashion_mnist(
    *, folder: str | None = None, hub: bool = False, normalise: Normalise = "standard"
) -> Dataset:
    """Fashion-MNIST: pieces of clothing, 60,000 and 10,000 images `[1, 28, 28]`, 10 classes.

    Args:
        folder: As in `mnist`.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean 0.2860, deviation 0.3530.

    Source: Xiao, Rasul, Vollgraf, Fashion-MNIST, 2017.
    """
    return _FASHION.dataset(folder, hub, normalise, _CLOTHES)


@datasets.register("emnist_letters")
def emnist_letters(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
    """EMNIST letters: 124,800 and 20,800 images `[1, 28, 28]` of 26 letters, both cases in one
    class.

    Labels 1..26 of the files become 0..25; images are turned upright (the files hold them
    transposed).

    Args:
        folder: The folder with the four idx files (plain or gz).
        normalise: `standard` takes mean and deviation of the training images.

    Source: Cohen et al., EMNIST, 2017.
    """
    return _EMNIST_LETTERS.dataset(folder, False, normalise, _LETTERS)


@datasets.register("emnist_l")
def emnist_l(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
    """EMNIST-L: the first ten letters of EMNIST letters, 48,000 and 8,000 images.

    Args:
        folder: As in `emnist_letters`.
        normalise: `standard` takes mean and deviation of these training images.

    Source: FedDC, section 4.1; FedUmf, appendix A.
    """
    train, test = (samples[samples.labels < 10] for samples in _EMNIST_LETTERS.load(folder, False))
    return image_dataset("emnist_l", (train, test), 10, normalise, None, _LETTERS[:10])


@datasets.register("emnist_balanced")
def emnist_balanced(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
    """EMNIST balanced: 112,800 and 18,800 images `[1, 28, 28]` of 47 characters (letters alike in
    both cases merged).

    Args:
        folder: As in `emnist_letters`, as is the preparation.
        normalise: `standard` takes mean and deviation of the training images.

    Source: Cohen et al., EMNIST, 2017.
    """
    return _EMNIST_BALANCED.dataset(folder, False, normalise, (*_DIGITS, *_LETTERS, *"abdefghnqrt"))
