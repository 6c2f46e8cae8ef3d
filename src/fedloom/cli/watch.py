"""`fedloom watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.errors import InvalidValue

Folder = Annotated[Path, typer.Argument(metavar="DIR", hidden=True)]
Port = Annotated[int, typer.Option("--port", help="Where to listen; 0 takes any port that is free.", min=0, max=65535)]


def watch(folder: Folder, port: Port = 8600) -> None:
    """Show runs in the browser while they go on.

    DIR holds runs, such as runs/digits, or all of runs. The page follows them by itself; only this machine can see it.
    Ctrl-C ends it.
    """
    from fedloom.experiment.watch.serve import Server

    if not folder.is_dir():
        raise InvalidValue(f"{folder} is {'no folder' if folder.exists() else 'not there'}: give a folder of runs")
    server = Server(folder, port)
    print(f"{folder}: {server.url}", flush=True)
    with server:
        server.serve_forever()
