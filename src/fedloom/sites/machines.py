"""A folder for each machine of a federation, with its keys, settings and start script."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from fedloom.sites.keys import HOME, Keys, make_keys

PORT = 8000
"""Port of the server."""

_FIRST_OWN_PORT = 9094  # Flower's default for the processes of a SuperNode

_TEMPLATES = files("fedloom.sites") / "app"


def write_machines(folder: Path, sites: int, hosts: Sequence[str] = ()) -> Keys:
    """Write the folders of a server and its sites, ready to copy, and the script `run.sh`.

    Args:
        folder: Folder of all machines, in the folder of the app.
        sites: Number of sites.
        hosts: Names or addresses of the server, the first for the sites; if empty, the server
            listens only on its own machine.

    Returns:
        The paths of the keys.

    Raises:
        InvalidValue: A host is not valid.
        DataError: A file cannot be read or written.
    """
    keys = make_keys(folder, sites, hosts)
    host = hosts[0] if hosts else HOME[1]
    address = f"[{host}]" if ":" in host else host
    listen = "0.0.0.0" if hosts else HOME[1]
    blanks = {"server": f"{address}:{PORT}", "sites": str(sites), "port": str(PORT)}
    _write(folder, "run", "run.sh", blanks)
    _write(keys.server, "server", "start-server.sh", {**blanks, "listen": listen})
    for site in range(sites):
        own = {**blanks, "site": str(site), "own": str(_FIRST_OWN_PORT + site)}
        _write(keys.site(site), "site", "start-site.sh", own)
    return keys


def _write(folder: Path, name: str, script: str, blanks: Mapping[str, str]) -> None:
    """Write a script and its settings into a folder."""
    settings = (_TEMPLATES / f"{name}.conf").read_text(encoding="utf-8")
    (folder / f"{name}.conf").write_text(Template(settings).substitute(blanks), encoding="utf-8")
    (folder / script).write_bytes((_TEMPLATES / script).read_bytes())
    (folder / script).chmod(0o755)
