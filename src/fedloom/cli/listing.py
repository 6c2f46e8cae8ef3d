"""`fedloom algorithms`, `models`, `datasets`, `partitions` and `objectives`: what there is, and what each is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedloom.cli.options import Name

if TYPE_CHECKING:
    from fedloom.config.registry import Registry


def algorithms(name: Name = None) -> None:
    """List the methods by family, or describe the one called NAME.

    The description of a method has its parameters.
    """
    from fedloom.algorithm import algorithms as registry
    from fedloom.algorithms.families import FAMILIES, family_of

    if name is not None:
        _list(registry, name)
        return
    from rich.console import Console

    from fedloom.cli.terminal import family_table

    console = Console()
    for family, title in FAMILIES.items():
        console.print(family_table(title, [entry for entry in registry if family_of(entry) == family]))
    console.print("\nfedloom algorithms NAME shows a method's parameters.")


def models(name: Name = None) -> None:
    """List the models, or describe the one called NAME."""
    from fedloom.models import models as registry

    _list(registry, name)


def datasets(name: Name = None) -> None:
    """List the data sets, or describe the one called NAME."""
    from fedloom.data.dataset import datasets as registry

    _list(registry, name)


def partitions(name: Name = None) -> None:
    """List the ways to share data out to clients, or describe the one called NAME."""
    from fedloom.data.partition import partitions as registry

    _list(registry, name)


def objectives(name: Name = None) -> None:
    """List what models can learn, or describe the objective called NAME."""
    from fedloom.objectives import objectives as registry

    _list(registry, name)


def _list(registry: Registry[Any], name: str | None) -> None:
    from rich.console import Console

    from fedloom.cli.terminal import description, overview

    if name is None:
        Console().print(overview(registry))
    else:
        print(description(registry[name]))
