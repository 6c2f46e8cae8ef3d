"""The standard sets of pictures; `picture_sets.toml` describes each of them."""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from fedloom.data.dataset import Dataset, datasets, hold_out
from fedloom.data.formats.arrow import hub_table, read_parquet
from fedloom.data.preprocessing import Scale
from fedloom.data.sets.normalisation import Normalise, Split, image_dataset
from fedloom.data.sets.origin import cached_split, files_named, load, parquet_files
from fedloom.data.sets.picture_files import (
    image_samples,
    read_idx_samples,
    read_labelled,
    read_python_batches,
    tiny_imagenet_files,
)


@dataclass(frozen=True)
class PictureSet:
    """An entry of `picture_sets.toml`.

    Attributes:
        name: The name of the data set.
        wanted: The files, for the error about a missing set.
        folders: Names of the folder that holds them.
        classes: The number of classes.
        text: The docstring of the data set; "" if its own function registers it.
        format: The format of the files; `tables` if only the hub's parquet files are read.
        files: The names of the files: of idx and batches those for testing come last.
        class_names: The name of each class.
        scale: Mean and standard deviation of each channel, by default computed from the pictures.
        repository: The set on the Hugging Face hub.
        label: The column of labels in tables; batches have its plural.
        channels: 1 (grey) or 3 (colour).
        tables: The beginnings of the names of parquet files, and the splits on the hub.
        first_label: The label of the first class in idx files.
        transposed: Idx files hold pictures by column.
        file_classes: The number of classes in the files, if only the first `classes` are read.
    """

    name: str
    wanted: str
    folders: tuple[str, ...]
    classes: int
    text: str = ""
    format: Literal["idx", "batches", "folder", "tables"] = "tables"
    files: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    scale: Scale | None = None
    repository: str = ""
    label: str = "label"
    channels: int = 3
    tables: tuple[str, str] = ("train", "test")
    first_label: int = 0
    transposed: bool = False
    file_classes: int = 0

    def load(self, folder: str | None, hub: bool) -> Split:
        """Return training and test samples; raises as `origin.load`.

        Args:
            folder: Folder of the user.
            hub: Download the set if no folder holds it.

        Returns:
            Training and test samples.
        """
        fetch = self._fetch if self.repository else None
        return load(self.name, self.folders, self.wanted, self._read, fetch, folder, hub)

    def dataset(self, split: Split, normalise: Normalise) -> Dataset:
        """Return the data set of training and test samples.

        Args:
            split: The samples.
            normalise: Normalisation of the pictures.

        Returns:
            The data set, with names of the classes and the scale of the pixels.
        """
        return image_dataset(
            self.name, split, self.classes, normalise, self.scale, self.class_names
        )

    def _read(self, folder: Path) -> Split | None:
        split = self._read_folder(folder) if self.format == "folder" else None
        if self.files and (files := files_named(folder, self.files)):
            split = self._read_idx(files) if self.format == "idx" else self._read_batches(files)
        paths = parquet_files(folder, *self.tables) if self.repository and split is None else None
        if paths is None:
            return split
        tables = ((read_parquet(found), str(found[0])) for found in paths)
        return cached_split(
            self.name, self.label, lambda: self._decoded(tables), [*paths[0], *paths[1]]
        )

    def _fetch(self) -> Split:
        tables = (
            (hub_table(self.repository, name), f"{self.repository} {name}") for name in self.tables
        )
        return cached_split(f"hub-{self.name}", self.repository, lambda: self._decoded(tables))

    def _decoded(self, tables: Iterable[tuple[Any, str]]) -> Split:
        train, test = (
            image_samples(table, self.label, self.classes, self.channels, source)
            for table, source in tables
        )
        return train, test

    def _read_idx(self, paths: Sequence[Path]) -> Split:
        classes = self.file_classes or self.classes
        train, test = (
            read_idx_samples(paths[k], paths[k + 1], classes, self.first_label, self.transposed)
            for k in (0, 2)
        )
        if self.file_classes:
            return train[train.labels < self.classes], test[test.labels < self.classes]
        return train, test

    def _read_batches(self, paths: Sequence[Path]) -> Split:
        key = f"{self.label}s"
        train = read_python_batches(paths[:-1], key, self.classes)
        return train, read_python_batches(paths[-1:], key, self.classes)

    def _read_folder(self, folder: Path) -> Split | None:
        if not (folder / "wnids.txt").is_file():
            return None
        train, test = tiny_imagenet_files(folder, self.classes)
        paths = [path for path, _ in (*train, *test) if path.is_file()]

        def decode() -> Split:
            return read_labelled(train, self.channels), read_labelled(test, self.channels)

        return cached_split(self.name, "folder", decode, paths)


def _register(pictures: PictureSet) -> None:
    """Register the function of an entry; `hub` is a parameter of sets on the hub only."""

    def hub_set(
        *, folder: str | None = None, hub: bool = False, normalise: Normalise = "standard"
    ) -> Dataset:
        return pictures.dataset(pictures.load(folder, hub), normalise)

    def local_set(*, folder: str | None = None, normalise: Normalise = "standard") -> Dataset:
        return pictures.dataset(pictures.load(folder, False), normalise)

    make: Callable[..., Dataset] = hub_set if pictures.repository else local_set
    make.__doc__ = pictures.text
    datasets.register(pictures.name)(make)


_TABLE = tomllib.loads(
    package_files("fedloom.data.sets").joinpath("picture_sets.toml").read_text("utf-8")
)
PICTURE_SETS = TypeAdapter(dict[str, PictureSet]).validate_python(
    {name: {"name": name, **entry} for name, entry in _TABLE.items()}
)
"""Entries of `picture_sets.toml` by name."""

for _entry in PICTURE_SETS.values():
    if _entry.text:
        _register(_entry)


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

    Returns:
        Pictures `[n, 3, 64, 64]` uint8, and labels from 0 to 199.
    """
    pictures = PICTURE_SETS["tiny_imagenet"]
    split = pictures.load(folder, hub)
    if test == "held_out":
        split = hold_out(split[0], test_fraction, 0)
    return pictures.dataset(split, normalise)
