"""`fedloom flower keys` and `fedloom flower init`: what real sites need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedloom.deploy.keys import Keys

app = typer.Typer(
    name="flower",
    help="Train over real sites with Flower: keys, and a runnable app.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", hidden=True)]


@app.command()
def keys(
    folder: Folder,
    sites: Annotated[int, typer.Option(help="How many sites there are.")],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name or address sites reach the server by; may be given several times."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long the server's certificate is good for.")] = 825,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make all keys anew, also those that are there.")] = False,
) -> None:
    """Make the keys of a federation in DIR: one folder for the server and one for each site.

    Keys that are there are kept, so the same command with more sites adds what is missing.
    """
    from fedloom.deploy.keys import make_keys

    _say_keys(make_keys(folder, sites, host or [], days, fresh), host or [])


def _say_keys(found: Keys, hosts: list[str]) -> None:
    """What was made and what goes where."""
    server, first = found.server, found.site(0)
    last = f" ... {found.site(found.sites - 1)}" if found.sites > 1 else ""
    print(
        f"{len(found.made)} files made in {found.folder}" if found.made else f"all keys were in {found.folder} already"
    )
    print(f"  {found.authority_key.parent}: signs certificates; keep it away from every machine of the federation")
    print(f"  {server}: to the machine of the server (ca.crt, server.crt, server.key, the sites' public keys)")
    print(f"  {first}{last}: each to its site alone (ca.crt, site.key)")
    print(f"The certificate is good for {', '.join(('localhost', '127.0.0.1', *hosts))}. Files *.key are secrets.")
