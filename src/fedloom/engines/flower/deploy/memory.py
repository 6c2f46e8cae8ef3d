"""What one site remembers from round to round, on its own disk: one file for each round that wrote something.

The server says which round's memory to go on from, and which it may still ask for. So a site that trains twice in the same round,
since the first reply was late, or since the server was killed, trains from the same memory and answers the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from fedloom.errors import CheckpointError
from fedloom.state.tensors import read_tensors, write_tensors

_NAME = re.compile(r"site-(\d+)\.v(\d+)\.safetensors")


class SiteMemory:
    """The memory of site `number` in one federation, which has a `folder` of its own."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number

    def read(self, version: int) -> dict[str, Tensor]:
        """What the site remembered after round `version`; nothing for round 0. Raises `DamagedCheckpoint` when it is lost."""
        if version == 0:
            return {}
        return read_tensors(self._path(version), site=str(self.number), round=str(version))[0]

    def write(self, version: int, tensors: dict[str, Tensor]) -> None:
        """Remember this of round `version`; all of it or nothing. Raises `CheckpointError` when it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be made ({error.strerror or error})") from None
        write_tensors(self._path(version), tensors, {"site": str(self.number), "round": str(version)})

    def forget(self, before: int, kept: Collection[int]) -> None:
        """Remove what rounds earlier than `before` wrote, except the versions that are kept."""
        for path in self.folder.glob("site-*.safetensors") if self.folder.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) == self.number and int(match[2]) < before and int(match[2]) not in kept:
                path.unlink(missing_ok=True)

    def _path(self, version: int) -> Path:
        return self.folder / f"site-{self.number:06d}.v{version}.safetensors"
