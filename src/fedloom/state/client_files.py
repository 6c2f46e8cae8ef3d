"""Clients' memory in files, one for each version of it: of all clients of a simulation, or of the one client of a site."""

import re
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from fedloom.state.files import make_folder, remove
from fedloom.state.tensors import read_tensors, write_tensors

Tensors = dict[str, Tensor]


class ClientFiles:
    """Named tensors by client and version, such as `client-000123.v7.safetensors`. A file is never changed.

    Args:
        folder: Folder of the files, which may not exist yet.
        labels: Names of the two numbers in a file's metadata; the first also begins the file's name.
    """

    def __init__(self, folder: Path, labels: tuple[str, str] = ("client", "version")) -> None:
        self.folder, self.labels = folder, labels
        self._pattern = re.compile(rf"{labels[0]}-(\d+)\.v(\d+)\.safetensors")

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{self.labels[0]}-{client:06d}.v{version}.safetensors"

    def scan(self) -> set[tuple[int, int]]:
        """Return client and version of every file."""
        names = (self._pattern.fullmatch(path.name) for path in self.folder.glob(f"{self.labels[0]}-*"))
        return {(int(match[1]), int(match[2])) for match in names if match}

    def read(self, client: int, version: int) -> Tensors:
        """Return what the client remembered. Raises `DamagedCheckpoint` when the file is missing or not as it was written."""
        return read_tensors(self.path(client, version), **self._about(client, version))[0]

    def write(self, client: int, version: int, tensors: Tensors, durable: bool = True) -> None:
        """Write all of it or nothing; `durable` as in `replacing`. Raises `CheckpointError` when it cannot be written."""
        make_folder(self.folder)
        write_tensors(self.path(client, version), tensors, self._about(client, version), durable)

    def remove(self, client: int, version: int) -> None:
        remove(self.path(client, version))

    def remove_before(self, client: int, version: int, needed: Collection[int]) -> None:
        """Remove what this client wrote before `version`, except the versions that are still needed."""
        for number, older in self.scan():
            if number == client and older < version and older not in needed:
                self.remove(number, older)

    def _about(self, client: int, version: int) -> dict[str, str]:
        return dict(zip(self.labels, (str(client), str(version)), strict=True))
