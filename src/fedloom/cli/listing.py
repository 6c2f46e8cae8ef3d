"""`fedloom list` for methods, models, data sets and others, and `fedloom schema`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from fedloom.cli.catalog import KINDS, Entries, cached_catalog, catalog
from fedloom.cli.options import option
from fedloom.common.errors import InvalidValue, UnknownName, quoted, suggestion

Schemed = Annotated[Path | None, typer.Argument(metavar="[FILE.toml]", hidden=True)]

With = Annotated[
    str | None, option("--with", metavar="Y", help="Show how NAME and Y combine, in both orders.")
]


def complete_name(incomplete: str) -> list[str]:
    """Return the kinds and names that begin with a text, for the completion of a command line."""
    names = [*KINDS, *(name for entries in cached_catalog().values() for name in entries)]
    return sorted({name for name in names if name.startswith(incomplete.lower())})


Listed = Annotated[
    str | None,
    typer.Argument(metavar="[KIND]", hidden=True, autocompletion=complete_name),
]
Described = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", hidden=True, autocompletion=complete_name),
]


def list_names(kind: Listed = None, name: Described = None, other: With = None) -> None:
    """List methods, models, data sets and more, or describe one: fedloom list [KIND] [NAME].

    KIND is algorithms, parts, models, datasets, partitions, objectives, engines or recorders. NAME
    without KIND is searched in all kinds, ignoring case and hyphens. With another
    method or part, as in fedloom list fedavg --with "sparse(share=0.1)", it prints the accepted
    expressions of the two, the moments of a round in which their parts act, and the reason why an
    expression is refused.
    """
    known = None if kind is None else _kind_of(kind)
    if kind is not None and known is None:
        if name is not None:
            raise UnknownName("kind", kind, KINDS)
        kind, name = None, kind
    if other is not None:
        if name is None:
            raise InvalidValue("--with needs two methods: fedloom list NAME --with Y")
        _print_combinations(name, other)
    elif name is not None:
        _describe(name, [known] if known else list(KINDS))
    elif known is not None:
        _print_table(known)
    else:
        _print_kinds()


def schema(file: Schemed = None) -> None:
    """Print the JSON schema of configuration files, for editors that complete keys.

    With FILE.toml the schema is written beside it, as fedloom.schema.json, and the file's first
    line names it.
    """
    from fedloom.runs.json_schema import schema_text, write_schema

    if file is None:
        print(schema_text(), end="")
    else:
        path = write_schema(file)
        print(f"{path}: named by the first line of {file}")


def _plain(name: str) -> str:
    """Return a name without case and punctuation, for a search: `LG-FedAvg` is `lgfedavg`."""
    return "".join(filter(str.isalnum, name.lower()))


def _kind_of(text: str) -> str | None:
    """Return the kind that a word names in the singular or the plural, or None."""
    for kind, about in KINDS.items():
        if _plain(text) in (_plain(kind), _plain(about.singular)):
            return kind
    return None


def _describe(name: str, kinds: list[str]) -> None:
    """Print the description of each entry of this name."""
    listed = catalog()
    described = set()
    names: dict[str, str] = {}
    for kind in kinds:
        for entry_name, entry in listed[kind].items():
            names.setdefault(entry_name, kind)
            if _plain(entry_name) == _plain(name) and entry["text"] not in described:
                described.add(entry["text"])
                _print_entry(entry_name, entry)
    if described:
        return
    if len(kinds) == 1:
        raise UnknownName(KINDS[kinds[0]].singular, name, names)
    near = suggestion(name, [*names, *KINDS])
    raise InvalidValue(f"unknown name {quoted(name)}{near} (fedloom list shows all kinds)")


def _print_entry(name: str, entry: dict[str, object]) -> None:
    parameters = entry["parameters"]
    arguments = entry["arguments"]
    assert isinstance(parameters, list)
    assert isinstance(arguments, dict)
    print(f"{name}({', '.join(parameters)})\n\n{entry['text']}")
    if arguments:
        print("\nParameters:")
    for parameter, text in arguments.items():
        about = f"{parameter}: {text}"
        print(fill(about, 100, initial_indent="    ", subsequent_indent="        "))


def _print_kinds() -> None:
    width = max(map(len, KINDS))
    listed = catalog()
    for kind, about in KINDS.items():
        count = len(listed[kind])
        print(f"  {kind:{width}}  {count:3d}  {about.purpose}")
    print("\nfedloom list KIND shows the names, fedloom list NAME describes one.")


def _print_table(kind: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    listed: Entries = catalog()[kind]
    console = Console()
    for group, members in groupby(listed.items(), lambda item: item[1]["group"]):
        title = Text(f"\n{group}", "bold") if group else None
        table = Table(
            box=None, show_header=False, padding=(0, 0, 0, 2), title=title, title_justify="left"
        )
        table.add_column(style="bold", no_wrap=True, width=max(map(len, listed)))
        table.add_column()
        for name, entry in members:
            table.add_row(name, Text(" ".join(entry["text"].partition("\n\n")[0].split())))
        console.print(table)
    console.print(f"\nfedloom list {kind} NAME shows its parameters.")


def _print_combinations(first: str, second: str) -> None:
    """Print each expression of two methods with its parts' moments, or the reason against it."""
    from fedloom.parts.combining import combinations

    for combination in combinations(first, second):
        if combination.reason:
            print(f"{combination.expression}: refused\n    {combination.reason}")
            continue
        print(f"{combination.expression}: accepted")
        width = max(map(len, combination.moments), default=0)
        for name, moments in combination.moments.items():
            print(f"    {name:{width}}  {', '.join(moments)}")
