"""Pictures and their labels in the files of standard sets: idx, Python batches, folders, tables."""

import gzip
import math
import pickletools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.common.errors import DataError, quoted, shortened
from fedloom.data.convert import class_labels
from fedloom.data.dataset import Samples
from fedloom.data.formats.arrow import column, decode_column
from fedloom.data.formats.limits import read_bytes, read_text, reading, require_room
from fedloom.data.formats.pictures import class_folders, pictures, read_files

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
Files = list[tuple[Path, int]]
"""Files of pictures, each with its label."""


def read_idx(path: Path) -> Tensor:
    """Read the uint8 tensor of an idx file, plain or packed with gzip.

    Raises:
        DataError: The file is damaged, or holds other numbers than bytes.
    """
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
        count = math.prod(shape)
        header = 4 + len(sizes)
        require_room(count, path)
        # the tensor shares its memory; nothing beyond is unpacked
        elements = bytearray(content.read(count + 1))
        if len(elements) != count:
            size = f"{header + len(elements)} bytes" + (" or more" if len(elements) > count else "")
            raise DataError(
                f"{path}: {size}, but an idx file of shape {quoted(shape)} has {header + count}"
            )
        return torch.from_numpy(np.frombuffer(elements, np.uint8).reshape(shape))


def read_idx_samples(
    images_path: Path,
    labels_path: Path,
    classes: int,
    first_label: int = 0,
    transposed: bool = False,
) -> Samples:
    """Read pictures and labels of idx files.

    Args:
        images_path: The file of pictures `[n, height, width]`.
        labels_path: The file of labels `[n]`.
        classes: The number of classes.
        first_label: The label of the first class in the file.
        transposed: The file holds pictures `[n, width, height]`.

    Returns:
        Pictures `[n, 1, height, width]` uint8, and labels from 0.

    Raises:
        DataError: A file is damaged, or a label is outside the classes.
    """
    images = read_idx(images_path)
    numbers = read_idx(labels_path)
    if images.dim() != 3:
        raise DataError(
            f"{images_path}: wanted 3 dimensions, the file has shape {list(images.shape)}"
        )
    labels = class_labels(numbers.numpy().astype("int64") - first_label, classes, labels_path)
    upright = images.transpose(1, 2).contiguous() if transposed else images
    with reading(images_path, "no pictures"):
        return Samples(upright.unsqueeze(1), labels)


def read_pickle(path: Path) -> tuple[npt.NDArray[np.uint8], dict[str, list[int]]]:
    """Read a pickle opcode by opcode, without building or running anything.

    Args:
        path: A file of CIFAR's python version.

    Returns:
        The longest string of bytes as rows of pixels, and the whole numbers after each text.
    """
    raw = b""
    key = ""
    by_column = False
    flag = False
    numbers: dict[str, list[int]] = {}
    with reading(path, "damaged pickle"):
        for opcode, argument, _ in pickletools.genops(read_bytes(path)):
            kinds = " ".join(kind.name for kind in opcode.stack_after)
            if isinstance(argument, str | bytes | bytearray):
                text = argument if isinstance(argument, str) else argument.decode("latin-1")
                # NumPy's flag of arrays by column precedes their bytes, or its letter F follows.
                if len(text) > len(raw):
                    raw = text.encode("latin-1", "replace")
                    by_column = flag
                key = text[:100]
                by_column = by_column or text == "F"
            elif type(argument) is int and "int" in kinds:
                numbers.setdefault(key, []).append(argument)
            elif "bool" in kinds:
                flag = opcode.name == "NEWTRUE" or argument is True
    with reading(path, f"no rows of {_PIXELS} bytes"):
        rows = len(raw) // _PIXELS, _PIXELS
        return np.frombuffer(raw, np.uint8).reshape(rows, order="F" if by_column else "C"), numbers


def read_python_batches(paths: Sequence[Path], label_key: str, classes: int) -> Samples:
    """Read pickled batches of CIFAR: red, green and blue planes `[n, 3072]`, and lists of labels.

    Args:
        paths: The files.
        label_key: Name of the list of labels.
        classes: Number of classes.

    Returns:
        Pictures `[n, 3, 32, 32]` uint8, and labels from 0, in the order of the files.

    Raises:
        DataError: A file holds no batch, or a label is outside the classes.
    """
    batches = []
    for path in paths:
        pixels, numbers = read_pickle(path)
        with reading(path, "no batch of pictures"):
            labels = class_labels(numbers.get(label_key) or np.empty(0, int), classes, path)
            batches.append(Samples(pixels.reshape(-1, *_SHAPE), labels))
    inputs = torch.cat([batch.inputs for batch in batches])
    return Samples(inputs, torch.cat([batch.labels for batch in batches]))


def read_labelled(files: Files, channels: int, size: tuple[int, int] | None = None) -> Samples:
    """Read picture files with their labels.

    Args:
        files: The files, each with its label.
        channels: 1 (grey) or 3 (colour).
        size: Height and width to scale to.

    Returns:
        Pictures `[n, channels, height, width]` uint8, and labels, in the order of the files.
    """
    labels = torch.tensor([label for _, label in files], dtype=torch.long)
    return Samples(read_files([path for path, _ in files], channels, size), labels)


def read_image_folder(
    root: Path, classes: Sequence[str], channels: int, size: tuple[int, int] | None = None
) -> Samples:
    """Read the samples `root/<class>/<picture>`.

    Args:
        root: Folder of the classes.
        classes: Names of the classes in the order of their labels.
        channels: 1 (grey) or 3 (colour).
        size: Height and width to scale to.

    Returns:
        Pictures `[n, channels, height, width]` uint8, sorted by class folder.

    Raises:
        DataError: A folder has an unknown class, or no folder has a picture.
    """
    numbers = {name: label for label, name in enumerate(classes)}
    names = class_folders(root)
    if strange := [name for name in names if name not in numbers]:
        listed = shortened(", ".join(classes))
        raise DataError(f"{root / strange[0]}: no such class among the training images ({listed})")
    files = [(path, numbers[name]) for name in names for path in pictures(root / name)]
    if not files:
        raise DataError(
            f"{root}: no pictures in its class folders (wanted {root}/<class>/<picture>)"
        )
    return read_labelled(files, channels, size)


def image_samples(table: Any, label: str, classes: int, channels: int, source: str) -> Samples:
    """Return the samples of packed pictures (column `image` or `img`) and labels.

    Args:
        table: Arrow table.
        label: Column of labels.
        classes: Number of classes.
        channels: 1 (grey) or 3 (colour).
        source: Name of the table in errors.

    Returns:
        Pictures `[n, channels, height, width]` uint8, and labels from 0.

    Raises:
        DataError: A picture or a label, named with its row, is unreadable.
    """
    with reading(source, "damaged labels"):
        labels = class_labels(column(table, (label,), source).to_numpy(), classes, source)
    return Samples(decode_column(table, channels, source), labels)


def tiny_imagenet_files(root: Path, most_classes: int) -> tuple[Files, Files]:
    """Return the pictures of Tiny ImageNet's folder.

    Args:
        root: The folder.
        most_classes: Number of classes at most.

    Returns:
        Training and validation pictures with their labels.

    Raises:
        DataError: A list of the folder is damaged, or a class has no pictures.
    """
    listing = root / "wnids.txt"
    label = {wnid: number for number, wnid in enumerate(sorted(set(_lines(listing))))}
    if not 0 < len(label) <= most_classes:
        raise DataError(f"{listing}: {len(label)} class ids, not 1 to {most_classes}")
    train: Files = []
    for wnid, number in label.items():
        folder = root / "train" / wnid / "images"
        if not wnid.isalnum() or not folder.is_dir():
            raise DataError(f"{listing}: class {quoted(wnid)} has no folder {quoted(str(folder))}")
        train += [(path, number) for path in pictures(folder)]
    annotations = root / "val" / "val_annotations.txt"
    validation: Files = []
    for number, line in enumerate(_lines(annotations), start=1):
        cells = line.split("\t")
        if len(cells) < 2 or cells[1] not in label or "/" in cells[0] or not cells[0].isprintable():
            raise DataError(
                f"{annotations}: line {number} does not name a picture and a class of wnids.txt"
            )
        validation.append((root / "val" / "images" / cells[0], label[cells[1]]))
    for name, files in (("train", train), ("val", validation)):
        if not files:
            raise DataError(f"{root / name}: no pictures")
    return train, validation


def _lines(path: Path) -> list[str]:
    return [line for line in read_text(path).splitlines() if line.strip()]
