"""Clients' memory in files, one for each version.

Used for all clients of a simulation, or for the one client of a site.
"""

import re
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from fedloom.state.files import make_folder, remove
from fedloom.state.tensors import read_tensors, write_tensors

Tensors = dict[str, Tensor]


class ClientFiles:
    """Named tensors by client and version, such as `client-000123.v7.safetensors`.

    A file is never changed. Only this user can read the files of `private` memory.
    """

    def __init__(self, folder: Path, private: bool = False) -> None:
        self.folder = folder  # may not exist yet
        self.private = private

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"client-{client:06d}.v{version}.safetensors"

    def scan(self) -> set[tuple[int, int]]:
        """Return client and version of every file."""
        pattern = re.compile(r"client-(\d+)\.v(\d+)\.safetensors")
        names = (pattern.fullmatch(path.name) for path in self.folder.glob("client-*"))
        return {(int(match[1]), int(match[2])) for match in names if match}

    def read(self, client: int, version: int) -> Tensors:
        """Return a version of the client's memory.

        Args:
            client: Number of the client.
            version: Number of the version, one of those that `scan` lists.

        Returns:
            The tensors by name, as `write` received them.

        Raises:
            DamagedCheckpoint: The file is missing or was changed.
        """
        return read_tensors(self.path(client, version), client=str(client), version=str(version))[0]

    def write(self, client: int, version: int, tensors: Tensors, durable: bool = True) -> None:
        """Write the tensors of a version, completely or not at all.

        Args:
            client: Number of the client.
            version: Number of the version.
            tensors: The client's memory.
            durable: As in `replacing`.

        Raises:
            CheckpointError: The file cannot be written.
        """
        make_folder(self.folder, 0o700 if self.private else 0o777)
        about = {"client": str(client), "version": str(version)}
        write_tensors(
            self.path(client, version), tensors, about, durable, 0o600 if self.private else 0o666
        )

    def remove(self, client: int, version: int) -> None:
        remove(self.path(client, version))

    def remove_before(self, client: int, version: int, needed: Collection[int]) -> None:
        """Remove this client's old versions.

        Args:
            client: Number of the client.
            version: The oldest version that is not removed.
            needed: Older versions that are not removed either.
        """
        for number, older in self.scan():
            if number == client and older < version and older not in needed:
                self.remove(number, older)
