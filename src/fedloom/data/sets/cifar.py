"""CIFAR-10 and CIFAR-100, the latter with its 100 fine or its 20 coarse labels: Python batches or
parquet.
"""

import pickletools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedloom.data.convert import class_labels
from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.limits import read_bytes, reading
from fedloom.data.preprocessing import Scale
from fedloom.data.sets.origin import Split, files_named
from fedloom.data.sets.picture_set import Normalise, PictureSet

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


def read_pickle(path: Path) -> tuple[npt.NDArray[np.uint8], dict[str, list[int]]]:
    """Return the longest string of bytes in a pickle as rows of pixels, and the whole numbers after
    each text.

    Opcodes are read one by one, and nothing is built or run.
    """
    raw, key, by_column, flag = b"", "", False, False
    numbers: dict[str, list[int]] = {}
    with reading(path, "damaged pickle"):
        for opcode, argument, _ in pickletools.genops(read_bytes(path)):
            kinds = " ".join(kind.name for kind in opcode.stack_after)
            if isinstance(argument, str | bytes | bytearray):
                text = argument if isinstance(argument, str) else argument.decode("latin-1")
                # NumPy's flag of arrays by column precedes their bytes, or its letter F follows.
                if len(text) > len(raw):
                    raw, by_column = text.encode("latin-1", "replace"), flag
                key, by_column = text[:100], by_column or text == "F"
            elif type(argument) is int and "int" in kinds:
                numbers.setdefault(key, []).append(argument)
            elif "bool" in kinds:
                flag = opcode.name == "NEWTRUE" or argument is True
    with reading(path, f"no rows of {_PIXELS} bytes"):
        rows = len(raw) // _PIXELS, _PIXELS
        return np.frombuffer(raw, np.uint8).reshape(rows, order="F" if by_column else "C"), numbers


def read_python_batches(paths: Sequence[Path], label_key: str, classes: int) -> Samples:
    """Read pickled batches: red, green and blue planes `[n, 3072]`, and the list `label_key`."""
    batches = []
    for path in paths:
        pixels, numbers = read_pickle(path)
        with reading(path, "no batch of pictures"):
            labels = class_labels(numbers.get(label_key) or np.empty(0, int), classes, path)
            batches.append(Samples(pixels.reshape(-1, *_SHAPE), labels))
    return Samples(
        torch.cat([batch.inputs for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
    )


def _cifar(
    name: str,
    folders: tuple[str, ...],
    batches: Sequence[str],
    classes: int,
    label: str,
    scale: Scale,
) -> PictureSet:
    def read(folder: Path) -> Split | None:
        if (files := files_named(folder, batches)) is None:
            return None
        train, test = (
            read_python_batches(paths, f"{label}s", classes) for paths in (files[:-1], files[-1:])
        )
        return train, test

    listed = f"{', '.join(batches)} or train*.parquet, test*.parquet"
    repository = f"uoft-cs/{name.removesuffix('_coarse')}"
    return PictureSet(name, folders, listed, read, classes, scale, repository, label)


_CIFAR10 = _cifar(
    "cifar10",
    ("cifar-10-batches-py", "cifar10", "cifar-10", "CIFAR10", "cifar10-jpeg"),
    ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"),
    10, "label", ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
)  # fmt: skip
_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_FOLDERS = ("cifar-100-python", "cifar100", "cifar-100", "CIFAR100")
_FINE: Scale = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
_COARSE: Scale = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_CIFAR100 = _cifar("cifar100", _FOLDERS, ("train", "test"), 100, "fine_label", _FINE)
_CIFAR100_COARSE = _cifar(
    "cifar100_coarse", _FOLDERS, ("train", "test"), 20, "coarse_label", _COARSE
)


@datasets.register("cifar10")
def cifar10(
    *, folder: str | None = None, hub: bool = False, normalise: Normalise = "standard"
) -> Dataset:
    """CIFAR-10: 50,000 and 10,000 colour images `[3, 32, 32]`, 10 classes.

    Args:
        folder: The folder with the Python batches or parquet.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean (.491, .482, .447), deviation (.247, .243, .262), as in FedDC
            and FedUmf; FedMR and FedALA use `half`.

    Source: Krizhevsky, 2009.
    """
    return _CIFAR10.dataset(folder, hub, normalise, _CLASSES)


@datasets.register("cifar100")
def cifar100(
    *, folder: str | None = None, hub: bool = False, normalise: Normalise = "standard"
) -> Dataset:
    """CIFAR-100 with fine labels: 50,000 and 10,000 colour images `[3, 32, 32]`, 100 classes.

    Args:
        folder: As in `cifar10`.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean (.5071, .4867, .4408), deviation (.2675, .2565, .2761), as in
            FedDC and FedUmf; FedALA uses `half`.

    Source: Krizhevsky, 2009.
    """
    return _CIFAR100.dataset(folder, hub, normalise)


@datasets.register("cifar100_coarse")
def cifar100_coarse(
    *, folder: str | None = None, hub: bool = False, normalise: Normalise = "standard"
) -> Dataset:
    """CIFAR-100 with coarse labels: the images of `cifar100` in 20 classes, as FedMR's code trains
    on them.

    Args:
        folder: As in `cifar10`.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean (.4914, .4822, .4465), deviation (.2023, .1994, .2010), as in
            FedMR.

    Source: Krizhevsky, 2009.
    """
    return _CIFAR100_COARSE.dataset(folder, hub, normalise)
