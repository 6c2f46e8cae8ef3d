"""MNIST and the sets that share its format: Fashion-MNIST and EMNIST."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.idx import read_idx
from fedloom.data.formats.labels import class_labels, same_length
from fedloom.data.sets.normalisation import Normalise, Scale, image_dataset
from fedloom.data.sets.origin import Origin, Split, Tables, files_named, load
from fedloom.errors import DataError

_DIGITS = tuple("0123456789")
_LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CLOTHES = ("T-shirt/top", *["trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag"], "ankle boot")
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@datasets.register("mnist")
def mnist(*, folder: str | None = None, hub: bool | None = None, normalise: Normalise = "standard") -> Dataset:
    """MNIST: handwritten digits, 60,000 and 10,000 images `[1, 28, 28]`, 10 classes.

    Args:
        folder: The folder with the four idx files (plain or gz) or parquet.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean 0.1307, deviation 0.3081.

    Source: LeCun, Bottou, Bengio, Haffner, Gradient-based learning applied to document recognition, 1998.
    """
    folders = ("MNIST", "mnist")
    scale: Scale = ((0.1307,), (0.3081,))
    return _idx_set("mnist", folders, "ylecun/mnist", scale, _DIGITS, folder, hub, normalise)


@datasets.register("fashion_mnist")
def fashion_mnist(*, folder: str | None = None, hub: bool | None = None, normalise: Normalise = "standard") -> Dataset:
    """Fashion-MNIST: pieces of clothing, 60,000 and 10,000 images `[1, 28, 28]`, 10 classes.

    Args:
        folder: As in `mnist`.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean 0.2860, deviation 0.3530.

    Source: Xiao, Rasul, Vollgraf, Fashion-MNIST, 2017.
    """
    folders = ("FashionMNIST", "fashion_mnist", "fashion-mnist", "fashion")
    scale: Scale = ((0.2860,), (0.3530,))
    return _idx_set("fashion_mnist", folders, "zalando-datasets/fashion_mnist", scale, _CLOTHES, folder, hub, normalise)


@datasets.register("emnist_letters")
def emnist_letters(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
    """EMNIST letters: 124,800 and 20,800 images `[1, 28, 28]` of 26 letters, both cases in one class.

    Labels 1..26 of the files become 0..25; images are turned upright (the files hold them transposed).

    Args:
        folder: The folder with the four idx files (plain or gz).
        normalise: `standard` takes mean and deviation of the training images.

    Source: Cohen et al., EMNIST, 2017.
    """
    return image_dataset("emnist_letters", _emnist("letters", 26, 1, folder), 26, normalise, None, _LETTERS)


@datasets.register("emnist_l")
def emnist_l(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
    """EMNIST-L: the first ten letters of EMNIST letters, 48,000 and 8,000 images.

    Args:
        folder: As in `emnist_letters`.
        normalise: `standard` takes mean and deviation of these training images.

    Source: FedDC, section 4.1; FedUmf, appendix A.
    """
    train, test = (samples[samples.labels < 10] for samples in _emnist("letters", 26, 1, folder))
    return image_dataset("emnist_l", (train, test), 10, normalise, None, _LETTERS[:10])


@datasets.register("emnist_balanced")
def emnist_balanced(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
    """EMNIST balanced: 112,800 and 18,800 images `[1, 28, 28]` of 47 characters (letters alike in both cases merged).

    Args:
        folder: As in `emnist_letters`, as is the preparation.
        normalise: `standard` takes mean and deviation of the training images.

    Source: Cohen et al., EMNIST, 2017.
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
    split = load(Origin(name, folders, _listed(_FILES), _idx_reader(_FILES, 10, tables), tables.fetch), folder, hub)
    return image_dataset(name, split, 10, normalise, scale, class_names)


def _emnist(split: str, classes: int, lowest: int, folder: str | None) -> Split:
    kinds = ("images-idx3", "labels-idx1")
    names = [f"emnist-{split}-{part}-{kind}-ubyte" for part in ("train", "test") for kind in kinds]
    read = _idx_reader(names, classes, None, lowest, transposed=True)
    return load(Origin(f"emnist {split}", ("EMNIST", "emnist"), _listed(names), read), folder, None)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{name}[.gz]" for name in names)


def _idx_reader(
    names: Sequence[str], classes: int, tables: Tables | None, lowest: int = 0, *, transposed: bool = False
) -> Callable[[Path], Split | None]:
    """Return a reader of the idx files `names` (images and labels to train, then to test), or else of `tables`."""

    def read(folder: Path) -> Split | None:
        files = files_named(folder, names)
        if files is None:
            return None if tables is None else tables.read(folder)
        train, test = (_idx_samples(files[k], files[k + 1], classes, lowest, transposed) for k in (0, 2))
        return train, test

    return read


def _idx_samples(images_path: Path, labels_path: Path, classes: int, lowest: int, transposed: bool) -> Samples:
    """Read the samples of two idx files, in which class 0 has the number `lowest`."""
    images = _require_dimensions(read_idx(images_path), 3, images_path)
    numbers = _require_dimensions(read_idx(labels_path), 1, labels_path)
    labels = class_labels(numbers.numpy().astype("int64") - lowest, classes, labels_path)
    same_length(len(images), len(labels), images_path)
    upright = images.transpose(1, 2).contiguous() if transposed else images
    return Samples(upright.unsqueeze(1), labels)


def _require_dimensions(tensor: Tensor, dimensions: int, path: Path) -> Tensor:
    if tensor.dim() != dimensions:
        shape: Sequence[int] = list(tensor.shape)
        raise DataError(f"{path}: wanted {dimensions} dimensions, the file has shape {shape}")
    return tensor
