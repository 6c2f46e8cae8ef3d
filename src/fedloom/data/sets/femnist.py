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
from fedloom.data.sets.origin import Origin, Split, cached_files, cached_split, load
from fedloom.data.sets.picture_set import Normalise, Scale, image_dataset
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

    def head(self, count: int) -> Writer:
        """Return the writer with only its first `count` samples, copied, so that the rest of its file can be freed."""
        return Writer(self.name, self.images[:count].clone(), self.labels[:count].clone())


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

    The defaults are FedMR's (`-s niid --sf 0.05 -k 100 -t sample`, about 180 writers).

    Args:
        folder: The folder with LEAF's `all_data/*.json` (100 writers a file), of which LEAF's "niid" sample is taken; or with
            `train/*.json` and `test/*.json`, already sampled and split.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is (0.5 - x) / 0.5, as in FedMR.
        fraction: In each file writers are taken in random order, whole, until this share of its samples is reached (the
            last is cut), in (0, 1].
        least: Writers with fewer samples are dropped, at least 2.
        test_fraction: The share of each writer's samples that is held out, in (0, 1).
        sample_seed: The seed of the writers.
        split_seed: The seed of the samples held out.
        preprocessed: Read `train` and `test` (True) or `all_data` (False); by default `all_data` only without the former.

    Source: Caldas et al., LEAF, 2018.
    """

    def split(writers: Sequence[Writer]) -> Split:
        samples = _samples([writer for writer in writers if len(writer) >= least])
        if not len(samples):
            raise DataError(
                f"femnist: no writer has {least} samples in a sample of {fraction} of the data; raise fraction"
            )
        return hold_out(samples, test_fraction, split_seed, within=samples.groups)

    def read(folder: Path) -> Split | None:
        ready = json_files(folder / "train")
        raw = json_files(folder / "all_data") or json_files(folder, "all_data*.json")
        if ready and preprocessed is not False:
            tests = json_files(folder / "test")
            if not tests:
                raise DataError(f"{folder / 'test'}: no json files, though {folder / 'train'} has some")
            return cached_files("femnist", "ready", [*ready, *tests], lambda: _read_preprocessed(ready, tests))
        if not raw or preprocessed:
            return None
        writers = (read_leaf_images(path, _CLASSES) for path in raw)
        return cached_files("femnist", f"raw {key}", raw, lambda: split(_sample_files(writers, fraction, sample_seed)))

    key = f"{fraction} {least} {test_fraction} {sample_seed} {split_seed}"

    def fetch() -> Split:
        return cached_split(
            "hub-femnist", key, lambda: split(_hub_writers(hub_table(_REPOSITORY, "train"), fraction, sample_seed))
        )

    files = "LEAF's all_data/*.json (or train/*.json and test/*.json)"
    folders = ("femnist", "FEMNIST", "leaf/data/femnist")
    samples = load(Origin("femnist", folders, files, read, fetch), folder, hub)
    return image_dataset("femnist", samples, _CLASSES, normalise, _SCALE, _NAMES)


def take_writers(sizes: Sequence[int], fraction: float, seed: int, file: int) -> list[tuple[int, int]]:
    """Draw LEAF's non-iid sample of one file: (position of a writer, number of its samples), in drawing order.

    Whole writers in random order until int(fraction * sum(sizes)) samples are taken; the last is cut to fit.
    """
    missing = int(fraction * sum(sizes))
    taken: list[tuple[int, int]] = []
    for position in numpy_stream(seed, f"femnist file {file}").permutation(len(sizes)).tolist():
        if missing <= 0:
            break
        taken.append((position, min(sizes[position], missing)))
        missing -= taken[-1][1]
    return taken


def _sample_files(files: Iterable[Sequence[Writer]], fraction: float, seed: int) -> list[Writer]:
    """Draw the sample of every file; one file is in memory at a time."""
    sample: list[Writer] = []
    for number, writers in enumerate(files):
        taken = take_writers([len(writer) for writer in writers], fraction, seed, number)
        sample += [writers[position].head(count) for position, count in taken]
    return sample


def _samples(writers: Sequence[Writer]) -> Samples:
    """Join the writers' samples, the groups numbered in the order of `writers`."""
    if not writers:
        return Samples(torch.empty((0, 1, 28, 28), dtype=torch.uint8), torch.empty(0, dtype=torch.long))
    groups = torch.repeat_interleave(torch.arange(len(writers)), torch.tensor([len(writer) for writer in writers]))
    return Samples(
        torch.cat([writer.images for writer in writers]), torch.cat([writer.labels for writer in writers]), groups
    )


def _read_preprocessed(train: Sequence[Path], test: Sequence[Path]) -> Split:
    """Read training and test samples as LEAF split them; a writer has one number in both."""
    splits = [[writer for path in paths for writer in read_leaf_images(path, _CLASSES)] for paths in (train, test)]
    names = dict.fromkeys(writer.name for writers in splits for writer in writers)
    number = {name: position for position, name in enumerate(names)}
    numbered: list[Samples] = []
    for writers in splits:
        samples = _samples(writers)
        if samples.groups is None or not len(samples):
            raise DataError(f"{train[0].parent.parent}: a part without samples")
        numbers = torch.tensor([number[writer.name] for writer in writers])
        numbered.append(Samples(samples.inputs, samples.labels, numbers[samples.groups]))
    return numbered[0], numbered[1]


def _hub_writers(table: Any, fraction: float, seed: int) -> list[Writer]:
    """Draw the sample of the hub's table, its writers in groups of 100 as in LEAF's files; only the sample is decoded."""
    ids = column(table, ("writer_id",), _REPOSITORY).to_numpy()
    labels = class_labels(column(table, ("character",), _REPOSITORY).to_numpy(), _CLASSES, _REPOSITORY)
    rows: dict[Any, list[int]] = {}
    for row, writer in enumerate(ids.tolist()):
        rows.setdefault(writer, []).append(row)
    names = list(rows)
    taken: list[tuple[str, list[int]]] = []
    for file, start in enumerate(range(0, len(names), _WRITERS_A_FILE)):
        group = names[start : start + _WRITERS_A_FILE]
        for position, count in take_writers([len(rows[name]) for name in group], fraction, seed, file):
            taken.append((str(group[position]), rows[group[position]][:count]))
    chosen = np.array([row for _, drawn in taken for row in drawn], dtype=np.int64)
    sizes = [len(drawn) for _, drawn in taken]
    images = decode_column(table.take(chosen), 1, _REPOSITORY).split(sizes)
    writers = zip(taken, images, labels[torch.from_numpy(chosen)].split(sizes), strict=True)
    return [Writer(name, pixels, classes) for (name, _), pixels, classes in writers]


def read_leaf_images(path: Path, classes: int) -> list[Writer]:
    """Read the writers of one LEAF json file, in the order of its `users`.

    Layout: `users` (names), `num_samples`, `user_data`: name -> `x` (lists of 784 pixels, byte / 255) and `y` (labels).
    Pixels become the bytes they were, round(255 x).

    Raises `DataError` for text that is not json, a missing key or user, pixels outside [0, 1], another number of pixels, or
    labels outside 0..classes-1.

    Source: Caldas et al., LEAF, 2018; github.com/TalwalkarLab/leaf.
    """

    def convert(user: dict[str, Any]) -> dict[str, Any]:
        if isinstance(user.get("x"), list) and isinstance(user.get("y"), list):
            return {"x": _pixels(user["x"], path), "y": class_labels(user["y"] or np.empty(0, int), classes, path)}
        return user

    return [_writer(name, user, path) for name, user in read_leaf(path, convert).items()]


def _writer(name: str, user: Mapping[str, Any], path: Path) -> Writer:
    if not isinstance(user["x"], Tensor):
        raise DataError(f"{path}: user {quoted(name)} has no x and y in user_data")
    same_length(len(user["x"]), len(user["y"]), f"{path}: user {quoted(name)}")
    return Writer(name, user["x"], user["y"])


def _pixels(rows: object, path: Path) -> Tensor:
    try:
        values = np.asarray(rows, dtype=np.float32).reshape(-1, _SIDE * _SIDE) if rows else np.empty((0, _SIDE * _SIDE))
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path}: x must be lists of {_SIDE * _SIDE} numbers") from error
    if not np.all((values >= 0) & (values <= 1)):
        raise DataError(f"{path}: pixels must lie in 0..1")
    return torch.from_numpy(np.rint(values * 255).astype(np.uint8)).view(-1, 1, _SIDE, _SIDE)
