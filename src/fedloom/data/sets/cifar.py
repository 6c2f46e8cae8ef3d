"""CIFAR-10 and CIFAR-100, the latter with its 100 fine or its 20 coarse labels: Python batches, binary batches or parquet."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.labels import class_labels, same_length
from fedloom.data.formats.limits import read_bytes
from fedloom.data.formats.pickles import Bytes, read_pickled_arrays
from fedloom.data.sets.origin import Split, files_named
from fedloom.data.sets.picture_set import Normalise, PictureSet, Scale
from fedloom.errors import DataError, shortened

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


def read_python_batches(paths: Sequence[Path], label_key: str, classes: int) -> Samples:
    """Read pickled batches: `data`, red, green and blue planes `[n, 3072]`, and the list `label_key`."""
    images: list[Bytes] = []
    labels: list[Tensor] = []
    for path in paths:
        batch = read_pickled_arrays(path)
        for key in ("data", label_key):
            if key not in batch:
                raise DataError(f"{path}: no {key!r} in the batch (it has: {shortened(', '.join(sorted(batch)))})")
        data = batch["data"]
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != _PIXELS:
            shape = list(data.shape) if isinstance(data, np.ndarray) else type(data).__name__
            raise DataError(f"{path}: data must be bytes of shape [n, {_PIXELS}], not {shape}")
        labels.append(class_labels(batch[label_key], classes, path))
        same_length(len(data), len(labels[-1]), path)
        images.append(data)
    return Samples(_images(images), torch.cat(labels))


def read_binary_batches(paths: Sequence[Path], label_bytes: int, label_offset: int, classes: int) -> Samples:
    """Read records of `label_bytes` bytes, the label at `label_offset`, and 3,072 bytes of pixels."""
    record = label_bytes + _PIXELS
    images: list[Bytes] = []
    labels: list[Tensor] = []
    for path in paths:
        content = np.frombuffer(read_bytes(path), dtype=np.uint8)
        if not len(content) or len(content) % record:
            raise DataError(f"{path}: {len(content)} bytes is not a whole number of records of {record} bytes")
        rows = content.reshape(-1, record)
        labels.append(class_labels(rows[:, label_offset], classes, path))
        images.append(rows[:, label_bytes:])
    return Samples(_images(images), torch.cat(labels))


def _images(batches: list[Bytes]) -> Tensor:
    """Join rows of pixels in one tensor of images. Consumes `batches`: each is freed once copied, so no pixel is there twice."""
    joined = np.empty((sum(len(batch) for batch in batches), _PIXELS), dtype=np.uint8)
    filled = 0
    while batches:
        batch = batches.pop(0)
        joined[filled : filled + len(batch)] = batch
        filled += len(batch)
    return torch.from_numpy(joined).view(-1, *_SHAPE)


def _cifar(
    name: str,
    folders: tuple[str, ...],
    batches: Sequence[str],
    classes: int,
    labels: Sequence[str],
    label: str,
    scale: Scale,
) -> PictureSet:
    """Return the set of `batches`, the last of them to test on; their binary records begin with `labels`, among them `label`."""
    binary = [f"{batch}.bin" for batch in batches]
    from_python = partial(read_python_batches, label_key=f"{label}s", classes=classes)
    from_binary = partial(
        read_binary_batches, label_bytes=len(labels), label_offset=labels.index(label), classes=classes
    )

    def read(folder: Path) -> Split | None:
        for names, samples in ((batches, from_python), (binary, from_binary)):
            if (files := files_named(folder, names)) is not None:
                return samples(files[:-1]), samples(files[-1:])
        return None

    listed = f"{', '.join(batches)} or {', '.join(binary)} or train*.parquet, test*.parquet"
    repository = f"uoft-cs/{name.removesuffix('_coarse')}"
    return PictureSet(name, folders, listed, read, classes, scale, repository, label)


_CIFAR10 = _cifar(
    "cifar10",
    ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "cifar-10", "CIFAR10", "cifar10-jpeg"),
    ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"),
    10, ("label",), "label", ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
)  # fmt: skip
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FOLDERS = ("cifar-100-python", "cifar-100-binary", "cifar100", "cifar-100", "CIFAR100")
_LABELS = ("coarse_label", "fine_label")
_FINE: Scale = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
_COARSE: Scale = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_CIFAR100 = _cifar("cifar100", _FOLDERS, ("train", "test"), 100, _LABELS, "fine_label", _FINE)
_CIFAR100_COARSE = _cifar("cifar100_coarse", _FOLDERS, ("train", "test"), 20, _LABELS, "coarse_label", _COARSE)


@datasets.register("cifar10")
def cifar10(*, folder: str | None = None, hub: bool = False, normalise: Normalise = "standard") -> Dataset:
    """CIFAR-10: 50,000 and 10,000 colour images `[3, 32, 32]`, 10 classes.

    Args:
        folder: The folder with the Python or the binary batches or parquet.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean (.491, .482, .447), deviation (.247, .243, .262), as in FedDC and FedUmf; FedMR and
            FedALA use `half`.

    Source: Krizhevsky, 2009.
    """
    return _CIFAR10.dataset(folder, hub, normalise, _CLASSES)


@datasets.register("cifar100")
def cifar100(*, folder: str | None = None, hub: bool = False, normalise: Normalise = "standard") -> Dataset:
    """CIFAR-100 with fine labels: 50,000 and 10,000 colour images `[3, 32, 32]`, 100 classes.

    Args:
        folder: As in `cifar10`.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean (.5071, .4867, .4408), deviation (.2675, .2565, .2761), as in FedDC and FedUmf; FedALA
            uses `half`.

    Source: Krizhevsky, 2009.
    """
    return _CIFAR100.dataset(folder, hub, normalise)


@datasets.register("cifar100_coarse")
def cifar100_coarse(*, folder: str | None = None, hub: bool = False, normalise: Normalise = "standard") -> Dataset:
    """CIFAR-100 with coarse labels: the images of `cifar100` in 20 classes, as FedMR's code trains on them.

    Args:
        folder: As in `cifar10`.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean (.4914, .4822, .4465), deviation (.2023, .1994, .2010), as in FedMR.

    Source: Krizhevsky, 2009.
    """
    return _CIFAR100_COARSE.dataset(folder, hub, normalise)
