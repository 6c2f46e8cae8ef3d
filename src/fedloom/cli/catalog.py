"""Names and descriptions of methods, models, data sets and others, from their docstrings.

They are stored in the user's cache folder, so that most commands need not import PyTorch. The cache
is made again after a change in a file of the package.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.common.plugins import VARIABLE

if TYPE_CHECKING:
    from fedloom.common.registry import RegistryEntry

Entries = dict[str, dict[str, Any]]
"""Entries by name.

Each has its `group`, its `parameters` with defaults, the `text` of its docstring, and the
descriptions of its parameters, `arguments`.
"""


class Kind(NamedTuple):
    """A kind of names.

    Attributes:
        singular: Its name in the singular.
        module: Module of its registry.
        registry: Name of its registry.
        purpose: Its description in the list of kinds.
    """

    singular: str
    module: str
    registry: str
    purpose: str


KINDS = {
    "algorithms": Kind(
        "algorithm", "fedloom.algorithm.method", "algorithms", "Methods, by family."
    ),
    "parts": Kind("part", "fedloom.algorithm.method", "algorithms", "Parts of a round, by moment."),
    "models": Kind("model", "fedloom.models", "models", "Models."),
    "datasets": Kind("data set", "fedloom.data.dataset", "datasets", "Data sets."),
    "partitions": Kind(
        "partition", "fedloom.data.partition", "partitions", "Ways to divide data among clients."
    ),
    "objectives": Kind("objective", "fedloom.objectives", "objectives", "What models can learn."),
    "engines": Kind("engine", "fedloom.engines.choose", "engines", "Where clients train."),
    "recorders": Kind(
        "recorder", "fedloom.recording.recorder", "recorders", "Further figures of a run."
    ),
}


Catalog = dict[str, Entries]
"""The entries of each kind."""


def catalog() -> Catalog:
    """Return the entries of all kinds, from the cache if it is up to date."""
    if os.environ.get(VARIABLE):  # plugins may register more
        return {kind: registered(kind) for kind in KINDS}
    cached = cached_catalog()
    if cached.keys() == KINDS.keys():
        return cached
    made = {kind: registered(kind) for kind in KINDS}
    path = cache_path()
    with suppress(OSError):  # without a cache, each command takes a second longer
        path.parent.mkdir(parents=True, exist_ok=True)
        for older in path.parent.glob("catalog-*.json"):
            older.unlink(missing_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(made), encoding="utf-8")
        temporary.replace(path)
    return made


def cached_catalog() -> Catalog:
    """Return the cached entries, for completion, which must not import PyTorch; empty without a
    cache.
    """
    with suppress(OSError, ValueError):
        cached = json.loads(cache_path().read_text(encoding="utf-8"))
        return cached if isinstance(cached, dict) else {}
    return {}


def cache_path() -> Path:
    """Return the path of the cache. It depends on all files of the package."""
    folder = Path(os.environ.get("FEDLOOM_CACHE") or Path.home() / ".cache" / "fedloom")
    return folder / f"catalog-{_package_stamp()}.json"


@cache
def _package_stamp() -> str:
    """Return a digest of the sizes and times of all files of the package."""
    package = Path(__file__).parents[1]
    stamps = hashlib.blake2b(str(package).encode(), digest_size=12)
    for path in sorted(package.rglob("*.py")):
        about = path.stat()
        stamps.update(f"{path} {about.st_size} {about.st_mtime_ns}\n".encode())
    return stamps.hexdigest()


def registered(kind: str) -> Entries:
    """Return the entries of a kind from its registry, ordered by group."""
    about = KINDS[kind]
    groups = _groups(kind)
    registry = getattr(importlib.import_module(about.module), about.registry)
    listed = [entry for entry in registry if not groups or entry.name in groups]
    current = {entry.make: entry for entry in listed}  # without earlier names of an entry
    listed = [entry for entry in listed if current[entry.make] is entry]
    titles = list(dict.fromkeys(groups.values()))
    listed.sort(key=lambda entry: titles.index(groups[entry.name]) if groups else 0)
    return {
        entry.name: {
            "group": groups.get(entry.name, ""),
            "parameters": signature(entry),
            "text": entry.text,
            "arguments": {name: text for name, text in entry.arguments.items() if text},
        }
        for entry in listed
    }


def _groups(kind: str) -> dict[str, str]:
    """Return the title of the group of each name, in the order of the titles.

    Empty for kinds without groups.
    """
    from fedloom.algorithm.method import algorithms
    from fedloom.parts.families import FAMILIES, family_of
    from fedloom.parts.moments import MOMENTS, parts_by_hook

    groups: dict[str, str] = {}
    if kind == "algorithms":
        families = {entry.name: family_of(entry) for entry in algorithms}
        for family, title in FAMILIES.items():
            groups |= {name: title for name, member in families.items() if member == family}
    elif kind == "parts":
        by_hook = parts_by_hook()
        for moment in MOMENTS:
            for hook in moment.hooks:
                for name in by_hook[hook]:
                    groups.setdefault(name, f"{moment.name.capitalize()} ({moment.runs})")
    return groups


def signature(entry: RegistryEntry[Any]) -> list[str]:
    """Return each parameter with its default, in the form of a configuration."""
    if getattr(entry.make, "variadic", False):
        return ["method:last round, ..., method"]
    return [_parameter(name, parameter) for name, parameter in entry.parameters.items()]


def _parameter(name: str, parameter: inspect.Parameter) -> str:
    from fedloom.common.expression import show

    if parameter.default is inspect.Parameter.empty:
        return name
    if repr(parameter.default) == "<factory>":
        return f"{name}=..."
    text = parameter.default
    return f"{name}={text if isinstance(text, str) and text.isidentifier() else show(text)}"
