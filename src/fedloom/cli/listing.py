"""`fedloom algorithms`, `models` and other commands that list a registry, and `fedloom schema`.

The texts are the docstrings, stored in `listings.json`, so that the commands need not import
PyTorch. After a change of a docstring run `python docs/generate/listings.py`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import Name, option
from fedloom.config.plugins import VARIABLE
from fedloom.errors import InvalidValue, UnknownName

if TYPE_CHECKING:
    from fedloom.config.registry import Entry

Schemed = Annotated[Path | None, typer.Argument(metavar="[FILE.toml]", hidden=True)]

With = Annotated[
    str | None, option("--with", metavar="Y", help="Show how NAME and Y combine, in both orders.")
]

SCHEMA = "fedloom.schema.json"

LISTINGS = Path(__file__).with_name("listings.json")

KINDS = {
    "algorithms": ("algorithm", "fedloom.method"),
    "models": ("model", "fedloom.models"),
    "datasets": ("data set", "fedloom.data.dataset"),
    "partitions": ("partition", "fedloom.data.partition"),
    "objectives": ("objective", "fedloom.objectives"),
}
"""Name of one entry of each kind, and the module of the registry."""

Listed = dict[str, dict[str, Any]]
"""Family, parameters with defaults, docstring and parameter descriptions of each name."""


def command(kind: str, purpose: str) -> Callable[..., None]:
    """Return the command that lists the entries of a kind, or describes one."""

    def entries(name: Name = None) -> None:
        _list(kind, name)

    entries.__name__, entries.__doc__ = kind, purpose
    return entries


def algorithms(name: Name = None, other: With = None) -> None:
    """List the methods by family, or describe NAME with its parameters.

    With another method or part, as in `fedloom algorithms fedavg --with "sparse(share=0.1)"`, it
    prints the accepted expressions of the two, the moments of a round in which their parts act, and
    the reason why an expression is refused.
    """
    if other is None:
        _list("algorithms", name)
    elif name is None:
        raise InvalidValue("--with needs two methods: fedloom algorithms NAME --with Y")
    else:
        _print_combinations(name, other)


def schema(file: Schemed = None) -> None:
    """Print the JSON schema of configuration files, for editors that complete keys.

    With FILE.toml the schema is written beside it, as fedloom.schema.json, and the file's first
    line names it.
    """
    from fedloom.runs.json_schema import json_schema
    from fedloom.state.files import write_text

    text = json.dumps(json_schema(), indent=1) + "\n"
    if file is None:
        print(text, end="")
        return
    content = file.read_text(encoding="utf-8")
    path = file.with_name(SCHEMA)
    write_text(path, text)
    if not content.startswith("#:schema "):
        write_text(file, f"#:schema {SCHEMA}\n{content}")
    print(f"{path}: named by the first line of {file}")


def registered(kind: str) -> Listed:
    """Return all entries of a kind from the registry."""
    from fedloom.parts.families import FAMILIES, family_of

    entries = list(getattr(importlib.import_module(KINDS[kind][1]), kind))
    families = {
        entry.name: FAMILIES[family_of(entry)] if kind == "algorithms" else "" for entry in entries
    }
    entries.sort(key=lambda entry: [*FAMILIES.values(), ""].index(families[entry.name]))
    return {
        entry.name: {
            "family": families[entry.name],
            "parameters": signature(entry),
            "text": entry.text,
            "arguments": {name: text for name, text in entry.arguments.items() if text},
        }
        for entry in entries
    }


def signature(entry: Entry[Any]) -> list[str]:
    """Return each parameter with its default, in the form of a configuration."""
    if getattr(entry.make, "variadic", False):
        return ["method:last round, ..., method"]
    return [_parameter(name, parameter) for name, parameter in entry.parameters.items()]


def _parameter(name: str, parameter: inspect.Parameter) -> str:
    from fedloom.config.expression import show

    if parameter.default is inspect.Parameter.empty:
        return name
    if repr(parameter.default) == "<factory>":
        return f"{name}=..."
    text = parameter.default
    return f"{name}={text if isinstance(text, str) and text.isidentifier() else show(text)}"


def _print_combinations(first: str, second: str) -> None:
    """Print each expression of two methods with its parts' moments, or the reason against it."""
    from fedloom.cli.combining import combinations

    for combination in combinations(first, second):
        if combination.reason:
            print(f"{combination.expression}: refused\n    {combination.reason}")
            continue
        print(f"{combination.expression}: accepted")
        width = max(map(len, combination.moments), default=0)
        for name, moments in combination.moments.items():
            print(f"    {name:{width}}  {', '.join(moments)}")


def _list(kind: str, name: str | None) -> None:
    plugins = os.environ.get(VARIABLE)
    entries: Listed = (
        registered(kind) if plugins else json.loads(LISTINGS.read_text(encoding="utf-8"))[kind]
    )
    if name is not None:
        if name not in entries:
            raise UnknownName(KINDS[kind][0], name, entries)
        entry = entries[name]
        print(f"{name}({', '.join(entry['parameters'])})\n\n{entry['text']}")
        if entry["arguments"]:
            print("\nParameters:")
        for parameter, text in entry["arguments"].items():
            print(
                fill(
                    f"{parameter}: {text}", 100, initial_indent="    ", subsequent_indent="        "
                )
            )
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for family, group in groupby(entries.items(), lambda item: item[1]["family"]):
        title = Text(f"\n{family}", "bold") if family else None
        table = Table(
            box=None, show_header=False, padding=(0, 0, 0, 2), title=title, title_justify="left"
        )
        table.add_column(style="bold", no_wrap=True, width=max(map(len, entries)))
        table.add_column()
        for entry_name, entry in group:
            table.add_row(entry_name, Text(" ".join(entry["text"].partition("\n\n")[0].split())))
        console.print(table)
    console.print(f"\nfedloom {kind} NAME shows its parameters.")
