"""What a run leaves on disk while it goes on: checkpoints, and one line of figures a round.

A checkpoint is one safetensors file, written under a temporary name and renamed, so that a kill leaves the old one or the new
one, never half of one. Loading runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedloom.errors import CheckpointError

FORMAT = "1"
KEPT = 2  # the newest, and the one before in case the newest turns out to be damaged


@dataclass(frozen=True)
class Checkpoint:
    """The state after `round` finished: the method's tensors and what the clients remember."""

    round: int
    server: dict[str, Tensor]
    clients: dict[str, Tensor]


class Checkpoints:
    """The checkpoints of one run, in its directory."""

    def __init__(self, directory: Path, run: str) -> None:
        self.directory = directory
        self.run = run  # what must be the same for a checkpoint to be continued
        self.notices: list[str] = []

    def paths(self) -> list[Path]:
        """Checkpoint files, newest first."""
        return sorted(self.directory.glob("checkpoint-*.safetensors"), reverse=True)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove those older than the one before it."""
        tensors = {f"server/{name}": t for name, t in checkpoint.server.items()}
        tensors |= {f"clients/{name}": t for name, t in checkpoint.clients.items()}
        metadata = {"format": FORMAT, "round": str(checkpoint.round), "run": self.run}
        write_tensors(self.directory / f"checkpoint-{checkpoint.round:07d}.safetensors", tensors, metadata)
        for old in self.paths()[KEPT:]:
            old.unlink(missing_ok=True)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that can be read; what had to be passed over is said in `notices`.

        Raises `CheckpointError` when a checkpoint belongs to a run of another configuration.
        """
        for path in self.paths():
            try:
                tensors, metadata = read_tensors(path)
            except CheckpointError as error:
                self.notices.append(f"{error}; falling back to the one before")
                continue
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{path} has format {metadata.get('format')!r}, this version reads {FORMAT!r}")
            if metadata.get("run") != self.run:
                raise CheckpointError(f"{path} belongs to a run of another configuration: choose another directory")
            return Checkpoint(int(metadata["round"]), _below("server/", tensors), _below("clients/", tensors))
        return None


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file, complete or not there at all."""
    temporary = path.with_name(f".{path.name}.writing")
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary, dict(metadata))
    _move(temporary, path)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises `CheckpointError` for a file that is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None


def write_text(path: Path, text: str) -> None:
    """A text file, complete or not there at all."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text)
    _move(temporary, path)


def _move(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


class RoundLog:
    """One JSON line a round, appended; a line cut short by a kill is dropped when the file is opened again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, finished: int) -> list[dict[str, Any]]:
        """The lines up to round `finished`; later ones, and a broken last one, are taken off the file.

        Raises `CheckpointError` when lines are missing that a finished round must have written.
        """
        kept = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if record["round"] > finished:
                break
            kept.append(record)
        if [record["round"] for record in kept] != list(range(1, finished + 1)):
            raise CheckpointError(
                f"{self.path} lacks rounds before {finished}: remove the run directory to start again"
            )
        write_text(self.path, "".join(f"{json.dumps(record)}\n" for record in kept))
        return kept

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line and hand it to the system at once."""
        with self.path.open("a") as file:
            file.write(f"{json.dumps(record)}\n")
