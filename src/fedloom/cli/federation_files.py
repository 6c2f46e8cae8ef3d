"""`fedloom flower keys` and `fedloom flower init`: files for real sites."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.options import Folder, option, short_help
from fedloom.common.errors import InvalidValue, MissingExtra

Hosts = Annotated[list[str] | None, option(metavar="NAME", help="A name or address of the server.")]

app = typer.Typer(
    name="flower",
    help="Train over real sites with Flower: keys, and a runnable app.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def keys(
    folder: Folder,
    sites: Annotated[int | None, typer.Option(help="Number of sites.")] = None,
    host: Hosts = None,
    days: Annotated[
        int, option(help="Days for which the server's certificate is valid, 825 by default.")
    ] = 825,
) -> None:
    """Make the keys of a federation in DIR: one folder for the server and one for each site.

    Existing keys are not changed, so the same command with more sites adds the missing keys.
    """
    from fedloom.sites.keys import make_keys

    if sites is None:
        raise InvalidValue("the number of sites is missing: give --sites, such as --sites 3")
    keys = make_keys(folder, sites, host or [], days)
    folders = f"{keys.site(0)} ... {keys.site(keys.sites - 1)}" if keys.sites > 1 else keys.site(0)
    print(f"{len(keys.written)} files made in {keys.folder}")
    print(
        f"  {keys.authority_key.parent}: signs certificates; do not copy it to a machine of "
        "the federation"
    )
    print(
        f"  {keys.server}: for the server's machine (ca.crt, server.crt, server.key, the "
        "sites' public keys)"
    )
    print(f"  {folders}: each only for its site (ca.crt, site.key, all public keys in peers.pub)")
    hosts = ", ".join(("localhost", "127.0.0.1", *(host or ())))
    print(f"The certificate is valid for {hosts}. Files *.key are secrets.")


def init(
    folder: Folder,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE.toml] [KEY=VALUE]...", hidden=True)
    ] = None,
    host: Hosts = None,
) -> None:
    """Write a Flower app into DIR that trains a configuration over real sites.

    FILE.toml is the configuration, KEY=VALUE changes one of its keys, such as algorithm=fedavg or
    data.clients=5, the number of sites. Without a file, an example with three sites is written.
    DIR/machines has a folder for each machine with keys, settings and a start script. Without
    --host, all programs run on this machine.
    """
    from fedloom.sites.keys import require_hosts
    from fedloom.sites.machines import write_machines
    from fedloom.sites.template import write_app

    require_hosts(host or [])
    overrides = list(arguments or [])
    file = Path(overrides.pop(0)) if overrides and "=" not in overrides[0] else None
    plan = write_app(folder, file, overrides)
    machines = folder / "machines"
    keys = write_machines(machines, plan.data.clients, host or [])
    print(
        f"{folder}: {plan.algorithm} on {plan.data.name} over {plan.data.clients} sites, "
        f"{plan.rounds} rounds"
    )
    print(f"next steps, as in {folder / 'README.md'}:")
    print(f"  copy {keys.server} and {machines / 'site-*'} to their machines")
    print(f"  {keys.server / 'start-server.sh'}     on the server")
    print(f"  {keys.site(0) / 'start-site.sh'}       at site 0, and likewise at the others")
    print(f"  {machines / 'run.sh'}     here")
    print("Files *.key are secrets.")


def run_app(folder: Path, config: Mapping[str, Any]) -> None:
    """Run the app in a folder by Flower's `flwr`, and show the output of the server.

    Args:
        folder: Folder of the app.
        config: Values of its run configuration.

    Raises:
        MissingExtra: `flwr` is not installed.
    """
    program = shutil.which(
        "flwr", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if program is None:
        raise MissingExtra("flwr", "flower", "a request to sites")
    values = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
    if code := subprocess.call([program, "run", str(folder), "--stream", "--run-config", values]):
        raise typer.Exit(code)


for command in (keys, init):
    app.command(short_help=short_help(command))(command)
