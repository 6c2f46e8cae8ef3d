"""FEMNIST: handwritten characters, each with its writer, from LEAF's json files and sampled as LEAF
samples them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.common.errors import DataError
from fedloom.common.fields import Share
from fedloom.common.randomness import numpy_stream
from fedloom.data.convert import class_labels
from fedloom.data.dataset import Dataset, Samples, datasets, hold_out
from fedloom.data.formats.arrow import column, decode_column, hub_table
from fedloom.data.formats.leaf import json_files, read_leaf
from fedloom.data.formats.limits import reading
from fedloom.data.sets.normalisation import Normalise, Split
from fedloom.data.sets.origin import cached_split, load
from fedloom.data.sets.picture_sets import PICTURE_SETS

Writer = TypeVar("Writer", Samples, Tensor)
_PICTURES = PICTURE_SETS["femnist"]
_CLASSES = _PICTURES.classes
_REPOSITORY = _PICTURES.repository
_SIDE = 28
_WRITERS_A_FILE = 100


@datasets.register("femnist")
def femnist(
    *,
    folder: str | None = None,
    hub: bool = False,
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
        folder: The folder with LEAF's `all_data/*.json` (100 writers a file), of which LEAF's
            "niid" sample is taken; or with `train/*.json` and `test/*.json`, already sampled and
            split.
        hub: Download from the Hugging Face hub.
        normalise: `standard` is (0.5 - x) / 0.5, as in FedMR.
        fraction: In each file writers are taken in random order, whole, until this share of its
            samples is reached (the last is cut), in (0, 1].
        least: Writers with fewer samples are dropped, at least 2.
        test_fraction: The share of each writer's samples that is held out, in (0, 1).
        sample_seed: The seed of the writers.
        split_seed: The seed of the samples held out.
        preprocessed: Read `train` and `test` (True) or `all_data` (False); by default `all_data`
            only without the former.

    Returns:
        Pictures `[n, 1, 28, 28]` uint8, labels from 0 to 61, and the writer of each sample.

    Source: Caldas et al., LEAF, 2018.
    """

    def read(folder: Path) -> Split | None:
        ready = json_files(folder / "train")
        raw = json_files(folder / "all_data") or json_files(folder, "all_data*.json")
        if ready and preprocessed is not False:
            tests = json_files(folder / "test")
            if not tests:
                raise DataError(
                    f"{folder / 'test'}: no json files, though {folder / 'train'} has some"
                )
            return cached_split(
                "femnist", "ready", lambda: _read_preprocessed(ready, tests), [*ready, *tests]
            )
        if not raw or preprocessed:
            return None
        files = ([writer for _, writer in read_leaf_images(path)] for path in raw)
        return cached_split(
            "femnist", f"raw {key}", lambda: split(_sample(files, fraction, sample_seed)), raw
        )

    def fetch() -> Split:
        return cached_split(
            "hub-femnist",
            key,
            lambda: split(_hub_writers(hub_table(_REPOSITORY, "train"), fraction, sample_seed)),
        )

    def split(writers: Sequence[Samples]) -> Split:
        large = [writer for writer in writers if len(writer) >= least]
        if not large:
            raise DataError(
                f"femnist: no writer has {least} samples in a sample of {fraction} of the "
                "data; raise fraction"
            )
        samples = _joined(large, range(len(large)))
        return hold_out(samples, test_fraction, split_seed, within=samples.groups)

    key = f"{fraction} {least} {test_fraction} {sample_seed} {split_seed}"
    samples = load("femnist", _PICTURES.folders, _PICTURES.wanted, read, fetch, folder, hub)
    return _PICTURES.dataset(samples, normalise)


def take_writers(
    sizes: Sequence[int], fraction: float, seed: int, file: int
) -> list[tuple[int, int]]:
    """Draw writers of a file as LEAF does: whole writers at random, the last one cut to fit.

    Args:
        sizes: Samples of each writer, `[writers]`.
        fraction: Share of the samples.
        seed: Seed of the draw.
        file: Number of the file.

    Returns:
        Writers and the numbers of their samples.
    """
    missing = int(fraction * sum(sizes))
    taken: list[tuple[int, int]] = []
    for position in numpy_stream(seed, f"femnist file {file}").permutation(len(sizes)).tolist():
        if missing <= 0:
            break
        taken.append((position, min(sizes[position], missing)))
        missing -= taken[-1][1]
    return taken


def _sample(files: Iterable[Sequence[Writer]], fraction: float, seed: int) -> list[Writer]:
    """Draw the samples of every file's writers, copied, so that one file is in memory at a time."""
    return [
        writers[position][torch.arange(count)]
        for number, writers in enumerate(files)
        for position, count in take_writers(
            [len(writer) for writer in writers], fraction, seed, number
        )
    ]


def _joined(writers: Sequence[Samples], numbers: Iterable[int]) -> Samples:
    sizes = torch.tensor([len(writer) for writer in writers])
    inputs, labels = (
        torch.cat([getattr(writer, name) for writer in writers]) for name in ("inputs", "labels")
    )
    return Samples(inputs, labels, torch.tensor(list(numbers)).repeat_interleave(sizes))


def _read_preprocessed(train: Sequence[Path], test: Sequence[Path]) -> Split:
    """Read training and test samples as LEAF split them; a writer has one number in both."""
    splits = [
        [writer for path in paths for writer in read_leaf_images(path)] for paths in (train, test)
    ]
    number = {
        name: k
        for k, name in enumerate(dict.fromkeys(name for name, _ in (*splits[0], *splits[1])))
    }
    if not all(any(len(samples) for _, samples in writers) for writers in splits):
        raise DataError(f"{train[0].parent.parent}: a part without samples")
    joined = (
        _joined([samples for _, samples in split], [number[name] for name, _ in split])
        for split in splits
    )
    return next(joined), next(joined)


def _hub_writers(table: Any, fraction: float, seed: int) -> list[Samples]:
    """Draw the sample of the hub's table, its writers in groups of 100 as in LEAF's files; only the
    sample is decoded.
    """
    labels = class_labels(
        column(table, ("character",), _REPOSITORY).to_numpy(), _CLASSES, _REPOSITORY
    )
    rows: dict[Any, list[int]] = {}
    for row, name in enumerate(column(table, ("writer_id",), _REPOSITORY).to_numpy().tolist()):
        rows.setdefault(name, []).append(row)
    writers = list(map(torch.tensor, rows.values()))
    files = (
        writers[start : start + _WRITERS_A_FILE]
        for start in range(0, len(writers), _WRITERS_A_FILE)
    )
    taken = _sample(files, fraction, seed)
    chosen = torch.cat(taken) if taken else torch.empty(0, dtype=torch.int64)
    sizes = [len(drawn) for drawn in taken]
    images = decode_column(table.take(chosen.numpy()), 1, _REPOSITORY).split(sizes)
    return list(map(Samples, images, labels[chosen].split(sizes)))


def read_leaf_images(path: Path) -> list[tuple[str, Samples]]:
    """Read each writer's `x` (lists of 784 pixels, byte / 255, which become bytes again) and
    `y`.
    """

    def convert(user: dict[str, Any]) -> dict[str, Any]:
        if isinstance(user.get("x"), list) and isinstance(user.get("y"), list):
            return {
                "x": _pixels(user["x"], path),
                "y": class_labels(user["y"] or np.empty(0, int), _CLASSES, path),
            }
        return user

    with reading(path, "no LEAF file of pictures"):
        return [(name, Samples(x, y)) for name, (x, y) in read_leaf(path, convert).items()]


def _pixels(rows: list[Any], path: Path) -> Tensor:
    with reading(path, f"x must be lists of {_SIDE * _SIDE} numbers"):
        values = np.array(rows, dtype=np.float32).reshape(len(rows), _SIDE * _SIDE)
    if not np.all((values >= 0) & (values <= 1)):
        raise DataError(f"{path}: pixels must be in 0..1")
    return torch.from_numpy(np.rint(values * 255).astype(np.uint8)).view(-1, 1, _SIDE, _SIDE)
