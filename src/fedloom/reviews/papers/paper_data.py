"""Data sets of the papers' settings: their sizes, and where they lie. Loads no data."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files

from fedloom.config.expression import parse
from fedloom.data.dataset import DataSpec
from fedloom.data.sets.origin import candidates


@dataclass(frozen=True)
class DataFacts:
    """Facts about a data set for which it need not be read (`datasets.toml`); generated data have
    no files.
    """

    label: str
    spec: DataSpec
    train: int
    test: int
    folders: Sequence[str] = ()
    files: Sequence[str] = ()


@cache
def facts() -> dict[str, DataFacts]:
    """Return the papers' data sets by name."""
    text = (package_files("fedloom.reviews.papers") / "datasets.toml").read_text(encoding="utf-8")
    by_name = {}
    for name, table in tomllib.loads(text).items():
        spec = DataSpec(
            tuple(table.pop("shape")), table.pop("classes"), table.pop("vocabulary", None)
        )
        by_name[name] = DataFacts(spec=spec, **table)
    return by_name


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
    return sorted({family(name) for name, data in facts().items() if data.files})


def at_hand(name: str, folder: str | None = None) -> bool:
    """Return True if the data set needs no file, or one of its files lies in `folder` or
    FEDLOOM_DATA.

    Only reading the files tells if they are complete.
    """
    data = facts()[name]
    paths = (
        path
        for base in candidates(data.folders, folder)
        for pattern in data.files
        for path in base.glob(pattern)
    )
    return not data.files or any(paths)
