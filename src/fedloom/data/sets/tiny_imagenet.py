"""Tiny ImageNet: 200 classes of ImageNet at 64 x 64 pixels."""

from pathlib import Path
from typing import Literal

from fedloom.data.dataset import Dataset, datasets, hold_out
from fedloom.data.formats.limits import read_text
from fedloom.data.formats.pictures import pictures
from fedloom.data.sets.origin import Split, cached_split
from fedloom.data.sets.picture_set import Normalise, PictureSet, image_dataset, labelled_pictures
from fedloom.errors import DataError, quoted

_CLASSES = 200


@datasets.register("tiny_imagenet")
def tiny_imagenet(
    *,
    folder: str | None = None,
    hub: bool = False,
    normalise: Normalise = "standard",
    test: Literal["validation", "held_out"] = "validation",
    test_fraction: float = 0.1,
) -> Dataset:
    """Tiny ImageNet: 100,000 training and 10,000 validation images `[3, 64, 64]`, 200 classes
    (label = rank of the id).

    Decoded pictures stay in the cache folder.

    Args:
        folder: The folder as Stanford packs it, or parquet files. The official test images have no
            labels.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is mean (.4802, .4481, .3975), deviation (.2770, .2691, .2821); FedALA
            uses `half`.
        test: `validation` tests on the validation images; `held_out` leaves them out and holds out
            `test_fraction` of each class, so that training and test samples are the 100,000 images
            that FedALA uses.
        test_fraction: The share of each class that `held_out` holds out, in (0, 1).
    """
    split = _SET.load(folder, hub)
    if test == "held_out":
        split = hold_out(split[0], test_fraction, 0)
    return image_dataset("tiny_imagenet", split, _CLASSES, normalise, _SET.scale)


def _read(folder: Path) -> Split | None:
    if not (folder / "wnids.txt").is_file():
        return None
    train, validation = _files(folder)
    paths = [path for path, _ in (*train, *validation) if path.is_file()]
    return cached_split(
        "tiny_imagenet",
        "folder",
        lambda: (labelled_pictures(train, 3), labelled_pictures(validation, 3)),
        paths,
    )


_SET = PictureSet(
    "tiny_imagenet", ("tiny-imagenet-200", "tiny-imagenet", "tiny_imagenet", "TinyImageNet", "tiny"),
    "wnids.txt, train/<wnid>/images/*.JPEG, val/val_annotations.txt, val/images/*.JPEG", _read, _CLASSES,
    ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)), "zh-plus/tiny-imagenet", tables=("train", "valid"),
)  # fmt: skip


def _files(root: Path) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    listing = root / "wnids.txt"
    label = {wnid: number for number, wnid in enumerate(sorted(set(_lines(listing))))}
    if not 0 < len(label) <= _CLASSES:
        raise DataError(f"{listing}: {len(label)} class ids, not 1 to {_CLASSES}")
    train: list[tuple[Path, int]] = []
    for wnid, number in label.items():
        folder = root / "train" / wnid / "images"
        if not wnid.isalnum() or not folder.is_dir():
            raise DataError(f"{listing}: class {quoted(wnid)} has no folder {quoted(str(folder))}")
        train += [(path, number) for path in pictures(folder)]
    annotations = root / "val" / "val_annotations.txt"
    validation: list[tuple[Path, int]] = []
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
