"""Sets of pictures: their files or tables, and the normalisation of their bytes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.data.convert import class_labels
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.formats.arrow import column, decode_column, hub_table, read_parquet
from fedloom.data.formats.limits import reading
from fedloom.data.formats.pictures import read_files
from fedloom.data.preprocessing import Scale
from fedloom.data.sets.origin import Split, cached_split, load, parquet_files

Normalise = Literal["standard", "half", "none"]
_CHUNK = 8192


@dataclass(frozen=True)
class PictureSet:
    """A set of pictures in files that `read` reads or, where it has a `repository` on the hub, in
    tables.
    """

    name: str
    folders: tuple[str, ...]
    files: str
    read: Callable[[Path], Split | None]
    classes: int
    scale: Scale | None = None
    repository: str = ""
    label: str = "label"
    channels: int = 3
    tables: tuple[str, str] = ("train", "test")

    def load(self, folder: str | None, hub: bool) -> Split:
        """Return training and test samples; raises as `origin.load`."""
        fetch = self._fetch if self.repository else None
        return load(self.name, self.folders, self.files, self._read, fetch, folder, hub)

    def dataset(
        self,
        folder: str | None,
        hub: bool,
        normalise: Normalise,
        class_names: Sequence[str] | None = None,
    ) -> Dataset:
        """Return the data set; raises as `origin.load`."""
        return image_dataset(
            self.name, self.load(folder, hub), self.classes, normalise, self.scale, class_names
        )

    def _read(self, folder: Path) -> Split | None:
        split = self.read(folder)
        paths = parquet_files(folder, *self.tables) if self.repository and split is None else None
        if paths is None:
            return split
        tables = ((read_parquet(files), str(files[0])) for files in paths)
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
            image_samples(table, self.label, self.classes, self.channels, name)
            for table, name in tables
        )
        return train, test


def labelled_pictures(
    files: Sequence[tuple[Path, int]], channels: int, size: tuple[int, int] | None = None
) -> Samples:
    """Return the samples of picture files, each with its label."""
    labels = torch.tensor([label for _, label in files], dtype=torch.long)
    return Samples(read_files([path for path, _ in files], channels, size), labels)


def image_samples(table: Any, label: str, classes: int, channels: int, source: str) -> Samples:
    """Return the samples of packed pictures (column `image` or `img`) and labels; raises
    `DataError` with `source` and row.
    """
    with reading(source, "damaged labels"):
        labels = class_labels(column(table, (label,), source).to_numpy(), classes, source)
    return Samples(decode_column(table, channels, source), labels)


def image_dataset(
    name: str, split: Split, classes: int, normalise: Normalise, standard: Scale | None = None,
    class_names: Sequence[str] | None = None,
) -> Dataset:  # fmt: skip
    """Return the data set of samples whose bytes are normalised, by default by their own figures."""
    train, test = split
    scale: Scale | None = None
    # `Dataset.prepare` scales bytes alone, so other inputs have nothing to normalise.
    if train.inputs.dtype == torch.uint8 and normalise != "none":
        half = ((0.5,) * train.inputs.shape[1],) * 2
        scale = half if normalise == "half" else standard or channel_scale(train.inputs)
    names = None if class_names is None else tuple(class_names)
    mean, std = scale or (None, None)
    return Dataset(name, train, test, classes, mean=mean, std=std, class_names=names)


def channel_scale(images: Tensor) -> Scale:
    """Return mean and standard deviation of each channel of uint8 `images [n, C, ...]`, over 255; 1
    for a constant channel.
    """
    counts = torch.zeros((images.shape[1], 256), dtype=torch.float64)
    for chunk in images.split(_CHUNK):  # counting takes eight bytes a pixel
        counts += torch.stack(
            [torch.bincount(plane.flatten(), minlength=256) for plane in chunk.unbind(1)]
        )
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True).clamp_min(1)
    mean = share @ values
    deviation = ((share @ values.square()) - mean.square()).clamp_min(0).sqrt()
    deviation[deviation < 1e-9] = 1.0
    return tuple(mean.tolist()), tuple(deviation.tolist())
