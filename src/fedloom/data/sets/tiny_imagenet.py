"""Tiny ImageNet: 200 classes of ImageNet at 64 x 64 pixels."""

from __future__ import annotations

from pathlib import Path

from fedloom.data.dataset import Dataset, datasets
from fedloom.data.formats.hub import hub_table
from fedloom.data.formats.parquet import image_samples, read_tables
from fedloom.data.formats.tiny_imagenet import class_ids, files, read_pictures
from fedloom.data.sets.choices import check_choice
from fedloom.data.sets.holdout import hold_out
from fedloom.data.sets.normalisation import Scale, check_normalise, image_dataset
from fedloom.data.sets.origin import Origin, Parts, cached_files, cached_parts, load, parquet_files
from fedloom.errors import DataError

_CLASSES = 200
_SCALE: Scale = ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
_TESTS = ("validation", "held_out")
_REPOSITORY = "zh-plus/tiny-imagenet"


@datasets.register("tiny_imagenet")
def tiny_imagenet(
    *,
    folder: str | None = None,
    hub: bool | None = None,
    normalise: str = "standard",
    test: str = "validation",
    test_fraction: float = 0.1,
) -> Dataset:
    """Tiny ImageNet: 100,000 training and 10,000 validation images `[3, 64, 64]`, 200 classes (label = rank of the id).

    Read from the folder as Stanford packs it or parquet, then kept decoded in the cache folder. The official test images
    have no labels, so `test="validation"` tests on the validation images; `test="held_out"` leaves them out and holds out
    `test_fraction` of each class instead, so that both parts together are the 100,000 images that FedALA uses.
    "standard": mean (.4802, .4481, .3975), deviation (.2770, .2691, .2821); FedALA uses "half".
    """
    check_normalise(normalise)
    check_choice("test", test, _TESTS)
    folders = ("tiny-imagenet-200", "tiny-imagenet", "tiny_imagenet", "TinyImageNet", "tiny")
    wanted = "wnids.txt, train/<wnid>/images/*.JPEG, val/val_annotations.txt, val/images/*.JPEG"
    parts = load(Origin("tiny_imagenet", folders, wanted, _read, _kept), folder, hub)
    if test == "held_out":
        parts = hold_out(parts[0], test_fraction, 0, within=parts[0].labels)
    return image_dataset("tiny_imagenet", parts, _CLASSES, normalise, _SCALE)


def _read(place: Path) -> Parts | None:
    if (place / "wnids.txt").is_file():
        train, validation = files(place)
        if len(class_ids(place)) > _CLASSES:
            raise DataError(f"{place / 'wnids.txt'}: more than {_CLASSES} classes")
        paths = [path for path, _ in (*train, *validation) if path.is_file()]
        return cached_files("tiny_imagenet", "folder", paths, lambda: (read_pictures(train), read_pictures(validation)))
    found = parquet_files(place, "train", "valid")
    if found is None:
        return None
    first, second = found
    return cached_files(
        "tiny_imagenet",
        "parquet",
        [*first, *second],
        lambda: (
            image_samples(read_tables(first), "label", _CLASSES, 3, str(first[0])),
            image_samples(read_tables(second), "label", _CLASSES, 3, str(second[0])),
        ),
    )


def _kept() -> Parts:
    return cached_parts("hub-tiny_imagenet", _REPOSITORY, _fetch)


def _fetch() -> Parts:
    train, validation = (
        image_samples(hub_table(_REPOSITORY, split), "label", _CLASSES, 3, f"{_REPOSITORY} {split}")
        for split in ("train", "valid")
    )
    return train, validation
