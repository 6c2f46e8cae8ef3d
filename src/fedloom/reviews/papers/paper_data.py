"""Data sets of the papers' settings: their sizes, and where their files are. Loads no data."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.common.expression import parse
from fedloom.data.dataset import DataSpec
from fedloom.data.sets.origin import candidates


@dataclass(frozen=True)
class DataFacts:
    """Facts about a data set that are known without reading it.

    Attributes:
        label: Name in tables.
        spec: Shape of a sample, classes and vocabulary.
        train: Number of samples to train on.
        test: Number of samples to test on.
        folders: Folders that hold it among all data.
        files: Patterns, one of which finds a file of it; generated data have none.
    """

    label: str
    spec: DataSpec
    train: int
    test: int
    folders: Sequence[str] = ()
    files: Sequence[str] = ()


FACTS = {
    "mnist": DataFacts(
        "MNIST",
        DataSpec((1, 28, 28), 10),
        60_000,
        10_000,
        folders=("MNIST", "mnist"),
        files=("train-images-idx3-ubyte*", "train*.parquet"),
    ),
    "emnist_l": DataFacts(
        "EMNIST-L",
        DataSpec((1, 28, 28), 10),
        48_000,
        8_000,
        folders=("EMNIST", "emnist"),
        files=("emnist-letters-train-images-idx3-ubyte*",),
    ),
    "cifar10": DataFacts(
        "CIFAR-10",
        DataSpec((3, 32, 32), 10),
        50_000,
        10_000,
        folders=("cifar-10-batches-py", "cifar10", "cifar-10", "CIFAR10", "cifar10-jpeg"),
        files=("data_batch_1*", "train", "train*.parquet"),
    ),
    "cifar100": DataFacts(
        "CIFAR-100",
        DataSpec((3, 32, 32), 100),
        50_000,
        10_000,
        folders=("cifar-100-python", "cifar100", "cifar-100", "CIFAR100"),
        files=("data_batch_1*", "train", "train*.parquet"),
    ),
    "cifar100_coarse": DataFacts(
        "CIFAR-100",
        DataSpec((3, 32, 32), 20),
        50_000,
        10_000,
        folders=("cifar-100-python", "cifar100", "cifar-100", "CIFAR100"),
        files=("data_batch_1*", "train", "train*.parquet"),
    ),
    "femnist": DataFacts(
        "FEMNIST",
        DataSpec((1, 28, 28), 62),
        36_000,
        4_000,
        folders=("femnist", "FEMNIST", "leaf/data/femnist"),
        files=("all_data/*.json", "train/*.json"),
    ),
    "tiny_imagenet": DataFacts(
        "Tiny-ImageNet",
        DataSpec((3, 64, 64), 200),
        90_000,
        10_000,
        folders=("tiny-imagenet-200", "tiny-imagenet", "tiny_imagenet", "TinyImageNet", "tiny"),
        files=("wnids.txt", "train*.parquet"),
    ),
    "ag_news": DataFacts(
        "AG News",
        DataSpec((200,), 4, 98635),
        120_000,
        7_600,
        folders=("ag_news_csv", "ag_news", "AG_NEWS", "agnews"),
        files=("train.csv", "train*.parquet"),
    ),
    "synthetic_feddc": DataFacts("synthetic", DataSpec((30,), 5), 4_000, 4_000),
}
"""The papers' data sets by name. The counts of FEMNIST and Tiny-ImageNet are those of the papers'
samples; FEMNIST is drawn, so a drawn set has nearly as many.
"""


def data_of(expression: str) -> str:
    """Return the name of the data set that an expression is of, or is a part of."""
    call = parse(expression)
    return parse(str(call.named["of"])).name if call.name == "part" else call.name


def family(name: str) -> str:
    """Return the name of the data's folder in options: CIFAR-100's two sets of labels share their
    files.
    """
    return name.removesuffix("_coarse")


def families() -> list[str]:
    """Return the names that folders have in options."""
    return sorted({family(name) for name, data in FACTS.items() if data.files})


def at_hand(name: str, folder: str | None = None) -> bool:
    """Return True if the data set needs no file, or one of its files exists.

    Only reading the files shows if they are complete.

    Args:
        name: Name of the data set.
        folder: Folder to search; by default the environment variable FEDLOOM_DATA.

    Returns:
        False if no file was found.
    """
    data = FACTS[name]
    paths = (
        path
        for base in candidates(data.folders, folder)
        for pattern in data.files
        for path in base.glob(pattern)
    )
    return not data.files or any(paths)
