"""Tiny ImageNet: 200 classes of ImageNet at 64 x 64 pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.limits import read_text
from fedloom.data.formats.pictures import pictures, read_files
from fedloom.data.sets.holdout import hold_out
from fedloom.data.sets.normalisation import Normalise, Scale, image_dataset
from fedloom.data.sets.origin import Origin, Parts, Tables, cached_files, load
from fedloom.errors import DataError

_CLASSES = 200
_SCALE: Scale = ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
_TABLES = Tables("tiny_imagenet", "zh-plus/tiny-imagenet", "label", _CLASSES, 3, ("train", "valid"))


@datasets.register("tiny_imagenet")
def tiny_imagenet(
    *,
    folder: str | None = None,
    hub: bool | None = None,
    normalise: Normalise = "standard",
    test: Literal["validation", "held_out"] = "validation",
    test_fraction: float = 0.1,
) -> Dataset:
    """Tiny ImageNet: 100,000 training and 10,000 validation images `[3, 64, 64]`, 200 classes (label = rank of the id).

    Read from the folder as Stanford packs it or parquet, then kept decoded in the cache folder. The official test images
    have no labels, so `test="validation"` tests on the validation images; `test="held_out"` leaves them out and holds out
    `test_fraction` of each class instead, so that both parts together are the 100,000 images that FedALA uses.
    "standard": mean (.4802, .4481, .3975), deviation (.2770, .2691, .2821); FedALA uses "half".
    """
    folders = ("tiny-imagenet-200", "tiny-imagenet", "tiny_imagenet", "TinyImageNet", "tiny")
    wanted = "wnids.txt, train/<wnid>/images/*.JPEG, val/val_annotations.txt, val/images/*.JPEG"
    parts = load(Origin("tiny_imagenet", folders, wanted, _read, _TABLES.fetch), folder, hub)
    if test == "held_out":
        parts = hold_out(parts[0], test_fraction, 0, within=parts[0].labels)
    return image_dataset("tiny_imagenet", parts, _CLASSES, normalise, _SCALE)


def _read(place: Path) -> Parts | None:
    if not (place / "wnids.txt").is_file():
        return _TABLES.read(place)
    train, validation = _files(place)
    if len(_class_ids(place)) > _CLASSES:
        raise DataError(f"{place / 'wnids.txt'}: more than {_CLASSES} classes")
    paths = [path for path, _ in (*train, *validation) if path.is_file()]
    return cached_files("tiny_imagenet", "folder", paths, lambda: (_read_pictures(train), _read_pictures(validation)))


def _class_ids(root: Path) -> list[str]:
    """The WordNet ids in `wnids.txt`, sorted; label k is the k-th. Raises `DataError` if there are none."""
    ids = sorted(set(_lines(root / "wnids.txt")))
    if not ids:
        raise DataError(f"{root / 'wnids.txt'}: no class ids")
    return ids


def _files(root: Path) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """(path, label) of every training and every validation picture.

    Layout: `train/<wnid>/images/*.JPEG`; `val/images/*.JPEG` with `val/val_annotations.txt`, whose lines are
    tab-separated: file name, wnid, box. Raises `DataError` naming the file or folder that is missing or wrong.
    """
    label = {wnid: at for at, wnid in enumerate(_class_ids(root))}
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


def _read_pictures(found: list[tuple[Path, int]]) -> Samples:
    """The samples of (path, label) pairs; raises `DataError` for a picture that is missing, unreadable or of another size."""
    labels = torch.tensor([label for _, label in found], dtype=torch.long)
    return Samples(read_files([path for path, _ in found], 3), labels)


def _lines(path: Path) -> list[str]:
    return [line for line in read_text(path).splitlines() if line.strip()]
