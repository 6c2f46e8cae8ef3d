"""Where a standard data set comes from: the user's folder, the folder of all data, or the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from fedloom.data.dataset import Samples
from fedloom.data.formats.arrow import hub_installed, hub_table, image_samples, read_tables
from fedloom.data.formats.cache import cached, file_stamp
from fedloom.errors import DataError, installing

Parts = tuple[Samples, Samples]  # training and test samples
T = TypeVar("T")
_INSIDE = ("", "raw", "gzip", "data", "plain_text")


@dataclass(frozen=True)
class Origin(Generic[T]):
    """How one set is found: names of its folder among all data, what files it wants (for the error), `read(folder)`
    giving its content or None when the folder does not hold it, and the way to fetch it from the hub, if there is one."""

    name: str
    folders: tuple[str, ...]
    wanted: str
    read: Callable[[Path], T | None]
    fetch: Callable[[], T] | None = None


@dataclass(frozen=True)
class Tables:
    """A set of pictures as one table for each part, in parquet files or on the hub. Pictures are decoded once, then kept in the
    cache folder."""

    name: str
    repository: str
    label: str
    classes: int
    channels: int
    splits: tuple[str, str] = ("train", "test")

    def read(self, folder: Path) -> Parts | None:
        """Both parts from the parquet files in `folder`; None unless both are there."""
        found = parquet_files(folder, *self.splits)
        if found is None:
            return None

        def decode() -> Parts:
            return self._decoded((read_tables(paths), str(paths[0])) for paths in found)

        return cached_files(self.name, self.label, [*found[0], *found[1]], decode)

    def fetch(self) -> Parts:
        """Both parts from the hub."""

        def decode() -> Parts:
            return self._decoded(
                (hub_table(self.repository, split), f"{self.repository} {split}") for split in self.splits
            )

        return cached_parts(f"hub-{self.name}", self.repository, decode)

    def _decoded(self, tables: Iterable[tuple[Any, str]]) -> Parts:
        train, test = (
            image_samples(table, self.label, self.classes, self.channels, source) for table, source in tables
        )
        return train, test


def load(origin: Origin[T], folder: str | None, hub: bool | None) -> T:
    """The content of `origin`, from the first place that has it.

    1. `folder`, or without it the environment variable FEDLOOM_DATA: the set's usual folders in it, then (for
       FEDLOOM_DATA only if its path names the set) the folder itself.
    2. The hub: with `hub=True`, or with `hub=None` if no folder is given and the package `datasets` is installed.

    Raises `DataError`, saying which files to put where, if no place has it, and `MissingExtra` for `hub=True`
    without the package.
    """
    if folder is not None and not Path(folder).is_dir():
        raise DataError(f"{folder}: no such folder (wanted for {origin.name})")
    for place in places(origin.folders, folder):
        content = origin.read(place)
        if content is not None:
            return content
    if origin.fetch is not None and (hub or (hub is None and folder is None and hub_installed())):
        return origin.fetch()
    where = folder or os.environ.get("FEDLOOM_DATA")
    looked = f"not in {where}" if where else "no folder given and FEDLOOM_DATA is not set"
    other = "" if origin.fetch is None else f", or {installing('hub')} and set hub=true to download it"
    raise DataError(
        f"{origin.name}: {looked}; put {origin.wanted} in FOLDER or FOLDER/{origin.folders[0]}"
        f" and set folder or FEDLOOM_DATA to FOLDER{other}"
    )


def cached_parts(name: str, key: str, make: Callable[[], Parts]) -> Parts:
    """`make()`, kept as tensors in the cache folder under (`name`, `key`)."""

    def tensors() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part, samples in zip(("train", "test"), make(), strict=True):
            found[f"{part}.inputs"], found[f"{part}.labels"] = samples.inputs, samples.labels
            if samples.groups is not None:
                found[f"{part}.groups"] = samples.groups
        return found

    kept = cached(name, key, tensors)
    train, test = (
        Samples(kept[f"{part}.inputs"], kept[f"{part}.labels"], kept.get(f"{part}.groups"))
        for part in ("train", "test")
    )
    return train, test


def cached_files(name: str, variant: str, files: Sequence[Path], make: Callable[[], Parts]) -> Parts:
    """`make()`, kept until a file of `files` changes in size or time; `variant` names everything else it depends on."""
    return cached_parts(name, f"{variant}\0{file_stamp(files)}", make)


def files_named(folder: Path, names: Sequence[str]) -> list[Path] | None:
    """The files `names` in `folder`, each plain or with `.gz`; None if there is none of them.

    Raises `DataError` naming the first that is missing when others are there.
    """
    found = [next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None) for name in names]
    if not any(found):
        return None
    for name, path in zip(names, found, strict=True):
        if path is None:
            raise DataError(f"{folder / name}: missing, though other files of the set are there")
    return [path for path in found if path is not None]


def parquet_files(folder: Path, train: str = "train", test: str = "test") -> tuple[list[Path], list[Path]] | None:
    """The parquet files of both parts in `folder`, by the beginnings of their names; None unless both are there."""
    parts = [sorted(folder.glob(f"{part}*.parquet")) for part in (train, test)]
    return (parts[0], parts[1]) if all(parts) else None


def places(folders: Sequence[str], folder: str | None) -> Iterator[Path]:
    """Where a set with these folders may lie, in `folder` or FEDLOOM_DATA; only places that exist."""
    given = folder or os.environ.get("FEDLOOM_DATA")
    if not given:
        return
    root = Path(given)
    bases = [root / name for name in folders]
    # Several sets use the same file names: the folder of all data counts as this set's only if its path says so.
    if folder is not None or {part.lower() for part in root.parts[-2:]} & {name.lower() for name in folders}:
        bases.append(root)
    seen: set[Path] = set()
    for base in bases:
        for inside in _INSIDE:
            place = base / inside
            if place.is_dir() and place.resolve() not in seen:
                seen.add(place.resolve())
                yield place
