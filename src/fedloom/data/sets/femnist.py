"""FEMNIST: handwritten characters, each with its writer, from LEAF's json files and sampled as LEAF samples them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.config.fields import Share
from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.arrow import column, decode_column, hub_table
from fedloom.data.formats.labels import class_labels, same_length
from fedloom.data.formats.leaf import json_files, read_leaf
from fedloom.data.sets.holdout import hold_out
from fedloom.data.sets.normalisation import Normalise, Scale, image_dataset
from fedloom.data.sets.origin import Origin, Parts, cached_files, cached_parts, load
from fedloom.errors import DataError, quoted
from fedloom.randomness import numpy_stream

_CLASSES = 62
_SIDE = 28
_NAMES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_WRITERS_A_FILE = 100
_REPOSITORY = "flwrlabs/femnist"
# (0.5 - x) / 0.5 of FedMR's code: ink, which LEAF stores dark, becomes the high value.
_SCALE: Scale = ((0.5,), (-0.5,))


@dataclass(frozen=True)
class Writer:
    """One user: uint8 images `[n, 1, 28, 28]` and labels `[n]`."""

    name: str
    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> Writer:
        """The writer with its first `count` samples only."""
        return Writer(self.name, self.images[:count], self.labels[:count])


@datasets.register("femnist")
def femnist(
    *,
    folder: str | None = None,
    hub: bool | None = None,
    normalise: Normalise = "standard",
    fraction: Share = 0.05,
    least: Annotated[int, Field(ge=2)] = 100,  # to train and to test
    test_fraction: float = 0.1,
    sample_seed: int = 0,
    split_seed: int = 0,
    preprocessed: bool | None = None,
) -> Dataset:
    """FEMNIST: characters `[1, 28, 28]` of 62 classes; the groups are the writers.

    Of `all_data/*.json` (100 writers a file) LEAF's "niid" sample is taken: in each file writers in random order, whole,
    until `fraction` of the file's samples is reached (the last is cut); writers with fewer than `least` are dropped; of
    each writer `test_fraction` is held out. The defaults are FedMR's (`-s niid --sf 0.05 -k 100 -t sample`, about 180
    writers). A folder with `train/*.json` and `test/*.json`, already sampled and split, is taken as it is, unless
    `preprocessed=False` asks for `all_data`. "standard" is (0.5 - x) / 0.5, as FedMR has it.
    Source: Caldas et al., LEAF, 2018.
    """

    def split(writers: Sequence[Writer]) -> Parts:
        kept = _samples([writer for writer in writers if len(writer) >= least])
        if not len(kept):
            raise DataError(
                f"femnist: no writer has {least} samples in a sample of {fraction} of the data; raise fraction"
            )
        return hold_out(kept, test_fraction, split_seed, within=kept.groups)

    def read(place: Path) -> Parts | None:
        ready = json_files(place / "train")
        raw = json_files(place / "all_data") or json_files(place, "all_data*.json")
        if ready and preprocessed is not False:
            tests = json_files(place / "test")
            if not tests:
                raise DataError(f"{place / 'test'}: no json files, though {place / 'train'} has some")
            return cached_files("femnist", "ready", [*ready, *tests], lambda: _read_preprocessed(ready, tests))
        if not raw or preprocessed:
            return None
        files = (read_leaf_images(path, _CLASSES) for path in raw)
        return cached_files("femnist", f"raw {key}", raw, lambda: split(_sample_files(files, fraction, sample_seed)))

    key = f"{fraction} {least} {test_fraction} {sample_seed} {split_seed}"

    def fetch() -> Parts:
        return cached_parts(
            "hub-femnist", key, lambda: split(_hub_writers(hub_table(_REPOSITORY, "train"), fraction, sample_seed))
        )

    wanted = "LEAF's all_data/*.json (or train/*.json and test/*.json)"
    folders = ("femnist", "FEMNIST", "leaf/data/femnist")
    parts = load(Origin("femnist", folders, wanted, read, fetch), folder, hub)
    return image_dataset("femnist", parts, _CLASSES, normalise, _SCALE, _NAMES)


def take_writers(sizes: Sequence[int], fraction: float, seed: int, file: int) -> list[tuple[int, int]]:
    """LEAF's non-iid sample of one file: (position of the writer, how many of its first samples), in drawing order.

    Whole writers in random order until int(fraction * sum(sizes)) samples are taken; the last is cut to fit.
    """
    left = int(fraction * sum(sizes))
    taken: list[tuple[int, int]] = []
    for position in numpy_stream(seed, f"femnist file {file}").permutation(len(sizes)).tolist():
        if left <= 0:
            break
        taken.append((position, min(sizes[position], left)))
        left -= taken[-1][1]
    return taken


def _sample_files(files: Iterable[Sequence[Writer]], fraction: float, seed: int) -> list[Writer]:
    """The sample of every file; one file is in memory at a time."""
    sample: list[Writer] = []
    for number, writers in enumerate(files):
        for position, count in take_writers([len(writer) for writer in writers], fraction, seed, number):
            kept = writers[position].first(count)
            # Copies, so that the rest of the file's pixels can be freed.
            sample.append(Writer(kept.name, kept.images.clone(), kept.labels.clone()))
    return sample


def _samples(writers: Sequence[Writer]) -> Samples:
    """The writers' samples one after another, the groups numbered in the order of `writers`."""
    if not writers:
        return Samples(torch.empty((0, 1, 28, 28), dtype=torch.uint8), torch.empty(0, dtype=torch.long))
    groups = torch.repeat_interleave(torch.arange(len(writers)), torch.tensor([len(writer) for writer in writers]))
    return Samples(
        torch.cat([writer.images for writer in writers]), torch.cat([writer.labels for writer in writers]), groups
    )


def _read_preprocessed(train: Sequence[Path], test: Sequence[Path]) -> Parts:
    """Both parts as LEAF split them; a writer has the same number in both."""
    parts = [[writer for path in paths for writer in read_leaf_images(path, _CLASSES)] for paths in (train, test)]
    names = dict.fromkeys(writer.name for part in parts for writer in part)
    number = {name: at for at, name in enumerate(names)}
    numbered: list[Samples] = []
    for part in parts:
        samples = _samples(part)
        if samples.groups is None or not len(samples):
            raise DataError(f"{train[0].parent.parent}: a part without samples")
        numbers = torch.tensor([number[writer.name] for writer in part])
        numbered.append(Samples(samples.inputs, samples.labels, numbers[samples.groups]))
    return numbered[0], numbered[1]


def _hub_writers(table: Any, fraction: float, seed: int) -> list[Writer]:
    """The sample of the hub's table: its writers in groups of 100, as LEAF's files; only what is taken is decoded."""
    ids = column(table, ("writer_id",), _REPOSITORY).to_numpy()
    labels = class_labels(column(table, ("character",), _REPOSITORY).to_numpy(), _CLASSES, _REPOSITORY)
    rows: dict[Any, list[int]] = {}
    for row, writer in enumerate(ids.tolist()):
        rows.setdefault(writer, []).append(row)
    names = list(rows)
    taken: list[tuple[str, list[int]]] = []
    for file, start in enumerate(range(0, len(names), _WRITERS_A_FILE)):
        some = names[start : start + _WRITERS_A_FILE]
        for position, count in take_writers([len(rows[name]) for name in some], fraction, seed, file):
            taken.append((str(some[position]), rows[some[position]][:count]))
    chosen = np.array([row for _, found in taken for row in found], dtype=np.int64)
    images = decode_column(table.take(chosen), 1, _REPOSITORY)
    sizes = [len(found) for _, found in taken]
    return [
        Writer(name, some_images, some_labels)
        for (name, _), some_images, some_labels in zip(
            taken, torch.split(images, sizes), torch.split(labels[torch.from_numpy(chosen)], sizes), strict=True
        )
    ]


def read_leaf_images(path: Path, classes: int) -> list[Writer]:
    """The writers of one LEAF json file, in the order of its `users`.

    Layout: `users` (names), `num_samples`, `user_data`: name -> `x` (lists of 784 pixels, byte / 255) and `y` (labels).
    Pixels become the bytes they were, round(255 x). Raises `DataError` for text that is not json, a missing key or
    user, pixels outside [0, 1], another number of pixels, or labels outside 0..classes-1.
    Source: Caldas et al., LEAF, 2018; github.com/TalwalkarLab/leaf.
    """

    def convert(found: dict[str, Any]) -> dict[str, Any]:
        if isinstance(found.get("x"), list) and isinstance(found.get("y"), list):
            return {"x": _pixels(found["x"], path), "y": class_labels(found["y"] or np.empty(0, int), classes, path)}
        return found

    return [_writer(name, found, path) for name, found in read_leaf(path, convert).items()]


def _writer(name: str, found: Mapping[str, Any], path: Path) -> Writer:
    if not isinstance(found["x"], Tensor):
        raise DataError(f"{path}: user {quoted(name)} has no x and y in user_data")
    same_length(len(found["x"]), len(found["y"]), f"{path}: user {quoted(name)}")
    return Writer(name, found["x"], found["y"])


def _pixels(rows: object, path: Path) -> Tensor:
    try:
        values = np.asarray(rows, dtype=np.float32).reshape(-1, _SIDE * _SIDE) if rows else np.empty((0, _SIDE * _SIDE))
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path}: x must be lists of {_SIDE * _SIDE} numbers") from error
    if not np.all((values >= 0) & (values <= 1)):
        raise DataError(f"{path}: pixels must lie in 0..1")
    return torch.from_numpy(np.rint(values * 255).astype(np.uint8)).view(-1, 1, _SIDE, _SIDE)
