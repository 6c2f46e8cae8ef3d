"""Clients' memory in files, one for each version of it: of all clients of a simulation, or of the
one client of a site.
"""

import re
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from fedloom.state.files import make_folder, remove
from fedloom.state.tensors import read_tensors, write_tensors

Tensors = dict[str, Tensor]


class ClientFiles:
    """Named tensors by client and version, such as `client-000123.v7.safetensors`. A file is never
    changed. Those of `private` memory only this user can read.
    """

    def __init__(self, folder: Path, private: bool = False) -> None:
        self.folder = folder  # which may not exist yet
        self.private = private

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"client-{client:06d}.v{version}.safetensors"

    def scan(self) -> set[tuple[int, int]]:
        """Return client and version of every file."""
        pattern = re.compile(r"client-(\d+)\.v(\d+)\.safetensors")
        names = (pattern.fullmatch(path.name) for path in self.folder.glob("client-*"))
        return {(int(match[1]), int(match[2])) for match in names if match}

    def read(self, client: int, version: int) -> Tensors:
        """Return what the client remembered. Raises `DamagedCheckpoint` when the file is missing or
        not as it was written.
        """
        return read_tensors(self.path(client, version), client=str(client), version=str(version))[0]

    def write(self, client: int, version: int, tensors: Tensors, durable: bool = True) -> None:
        """Write all of it or nothing; `durable` as in `replacing`. Raises `CheckpointError` when it
        cannot be written.
        """
        make_folder(self.folder, 0o700 if self.private else 0o777)
        about = {"client": str(client), "version": str(version)}
        write_tensors(
            self.path(client, version), tensors, about, durable, 0o600 if self.private else 0o666
        )

    def remove(self, client: int, version: int) -> None:
        remove(self.path(client, version))

    def remove_before(self, client: int, version: int, needed: Collection[int]) -> None:
        """Remove what this client wrote before `version`, except the versions that are still
        needed.
        """
        for number, older in self.scan():
            if number == client and older < version and older not in needed:
                self.remove(number, older)
