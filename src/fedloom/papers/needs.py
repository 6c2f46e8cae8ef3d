"""Which data a setting needs, how large they are, and whether they are at hand. Nothing is loaded here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedloom.config.expression import Call, parse
from fedloom.data.dataset import DataSpec
from fedloom.data.formats.arrow import hub_installed

_INSIDE = ("", "raw", "gzip", "data", "plain_text")


@dataclass(frozen=True)
class Facts:
    """What is known of a data set without reading it: its label, what a model must know, samples to train and to test, folders
    it lies in among all data, patterns of which one finds a file of it, and whether the hub has it."""

    label: str
    spec: DataSpec
    train: int
    test: int
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    hub: bool = True

    @property
    def generated(self) -> bool:
        """Whether it needs no files."""
        return not self.files


_CIFAR = ("data_batch_1*", "train", "train.bin", "train*.parquet")

FACTS = {
    "mnist": Facts(
        "MNIST",
        DataSpec((1, 28, 28), 10),
        60_000,
        10_000,
        ("MNIST", "mnist"),
        ("train-images-idx3-ubyte*", "train*.parquet"),
    ),
    "emnist_l": Facts(
        "EMNIST-L",
        DataSpec((1, 28, 28), 10),
        48_000,
        8_000,
        ("EMNIST", "emnist"),
        ("emnist-letters-train-images-idx3-ubyte*",),
        hub=False,
    ),
    "cifar10": Facts(
        "CIFAR-10",
        DataSpec((3, 32, 32), 10),
        50_000,
        10_000,
        ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "cifar-10", "CIFAR10", "cifar10-jpeg"),
        _CIFAR,
    ),
    "cifar100": Facts(
        "CIFAR-100",
        DataSpec((3, 32, 32), 100),
        50_000,
        10_000,
        ("cifar-100-python", "cifar-100-binary", "cifar100", "cifar-100", "CIFAR100"),
        _CIFAR,
    ),
    "cifar100_coarse": Facts(
        "CIFAR-100",
        DataSpec((3, 32, 32), 20),
        50_000,
        10_000,
        ("cifar-100-python", "cifar-100-binary", "cifar100", "cifar-100", "CIFAR100"),
        _CIFAR,
    ),
    "femnist": Facts(
        "FEMNIST",
        DataSpec((1, 28, 28), 62),
        36_000,
        4_000,
        ("femnist", "FEMNIST", "leaf/data/femnist"),
        ("all_data/*.json", "train/*.json"),
    ),
    "tiny_imagenet": Facts(
        "Tiny-ImageNet",
        DataSpec((3, 64, 64), 200),
        90_000,
        10_000,
        ("tiny-imagenet-200", "tiny-imagenet", "tiny_imagenet", "TinyImageNet", "tiny"),
        ("wnids.txt", "train*.parquet"),
    ),
    "ag_news": Facts(
        "AG News",
        DataSpec((200,), 4, 98_635),
        120_000,
        7_600,
        ("ag_news_csv", "ag_news", "AG_NEWS", "agnews"),
        ("train.csv", "train*.parquet"),
    ),
    "synthetic_feddc": Facts("synthetic", DataSpec((30,), 5), 4_000, 4_000),
}
"""FEMNIST's and Tiny-ImageNet's counts are those of the papers' samples; FEMNIST's are near, since it is drawn."""


def in_folder(expression: str, folder: str | None) -> str:
    """The data set's expression with its folder."""
    if folder is None:
        return expression
    call = parse(expression)
    return str(Call(call.name, call.positional, {**call.named, "folder": folder}))


def family(name: str) -> str:
    """The name under which a folder is given: CIFAR-100's two sets of labels share their files."""
    return {"cifar100_coarse": "cifar100"}.get(name, name)


def at_hand(name: str, folder: str | None = None) -> bool:
    """Whether a file of the data set is found in `folder` or FEDLOOM_DATA, or the hub's package is there to fetch it.

    Whether the files are whole is only seen when they are read.
    """
    facts = FACTS[name]
    if facts.generated:
        return True
    given = folder or os.environ.get("FEDLOOM_DATA")
    if given:
        root = Path(given)
        bases = [root / one for one in facts.folders] + ([root] if folder or root.name in facts.folders else [])
        places = [base / inside for base in bases for inside in _INSIDE]
        if any(next(place.glob(pattern), None) for place in places if place.is_dir() for pattern in facts.files):
            return True
    return facts.hub and folder is None and hub_installed()
