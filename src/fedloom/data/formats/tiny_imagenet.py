"""Tiny ImageNet as Stanford packs it: one folder a class for training, one folder and a table for validation."""

from __future__ import annotations

from pathlib import Path

import torch

from fedloom.data.dataset import Samples
from fedloom.data.formats.images import pictures, read_files
from fedloom.errors import DataError

_CHANNELS = 3


def class_ids(root: Path) -> list[str]:
    """The WordNet ids in `wnids.txt`, sorted; label k is the k-th. Raises `DataError` if there are none."""
    ids = sorted(set(_lines(root / "wnids.txt")))
    if not ids:
        raise DataError(f"{root / 'wnids.txt'}: no class ids")
    return ids


def files(root: Path) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """(path, label) of every training and every validation picture.

    Layout: `train/<wnid>/images/*.JPEG`; `val/images/*.JPEG` with `val/val_annotations.txt`, whose lines are
    tab-separated: file name, wnid, box. Raises `DataError` naming the file or folder that is missing or wrong.
    """
    label = {wnid: at for at, wnid in enumerate(class_ids(root))}
    train: list[tuple[Path, int]] = []
    for wnid, at in label.items():
        folder = root / "train" / wnid / "images"
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder, though {wnid} is in wnids.txt")
        train += [(path, at) for path in pictures(folder)]
    table = root / "val" / "val_annotations.txt"
    validation: list[tuple[Path, int]] = []
    for number, line in enumerate(_lines(table), start=1):
        cells = line.split("\t")
        if len(cells) < 2 or cells[1] not in label:
            raise DataError(f"{table}: line {number} does not name a picture and a class of wnids.txt: {line[:60]!r}")
        validation.append((root / "val" / "images" / cells[0], label[cells[1]]))
    for part, found in (("train", train), ("val", validation)):
        if not found:
            raise DataError(f"{root / part}: no pictures")
    return train, validation


def read_pictures(found: list[tuple[Path, int]]) -> Samples:
    """The samples of (path, label) pairs; raises `DataError` for a picture that is missing, unreadable or of another size."""
    labels = torch.tensor([label for _, label in found], dtype=torch.long)
    return Samples(read_files([path for path, _ in found], _CHANNELS), labels)


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file") from error
