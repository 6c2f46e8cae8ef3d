"""Which data the papers' settings need, how large they are, and whether they are at hand. Nothing is loaded here."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files

from fedloom.config.expression import Call, parse
from fedloom.data.dataset import DataSpec
from fedloom.data.formats.arrow import hub_installed
from fedloom.data.sets.origin import places


@dataclass(frozen=True)
class DataFacts:
    """What is known of a data set without reading it (`datasets.toml`)."""

    label: str
    spec: DataSpec
    train: int
    test: int
    folders: Sequence[str] = ()
    files: Sequence[str] = ()
    hub: bool = True

    @property
    def generated(self) -> bool:
        """Whether it needs no files."""
        return not self.files


@cache
def facts() -> dict[str, DataFacts]:
    """The papers' data sets by name."""
    text = (package_files("fedloom.papers") / "datasets.toml").read_text(encoding="utf-8")
    found = {}
    for name, table in tomllib.loads(text).items():
        spec = DataSpec(tuple(table.pop("shape")), table.pop("classes"), table.pop("vocabulary", None))
        found[name] = DataFacts(spec=spec, **table)
    return found


def data_of(expression: str) -> str:
    """The name of the data set that an expression is of, or is a part of."""
    call = parse(expression)
    return parse(str(call.named["of"])).name if call.name == "part" else call.name


def in_folder(expression: str, folder: str | None) -> str:
    """The data set's expression with its folder."""
    if folder is None:
        return expression
    call = parse(expression)
    return str(Call(call.name, call.positional, {**call.named, "folder": folder}))


def family(name: str) -> str:
    """The name under which a folder is given: CIFAR-100's two sets of labels share their files."""
    return {"cifar100_coarse": "cifar100"}.get(name, name)


def families() -> list[str]:
    """The names under which folders can be given."""
    return sorted({family(name) for name, known in facts().items() if not known.generated})


def at_hand(name: str, folder: str | None = None) -> bool:
    """Whether a file of the data set is found in `folder` or FEDLOOM_DATA, or the hub's package is there to fetch it.

    Whether the files are complete is only found out when they are read.
    """
    known = facts()[name]
    if known.generated or any(
        next(place.glob(pattern), None) for place in places(known.folders, folder) for pattern in known.files
    ):
        return True
    return known.hub and folder is None and hub_installed()
