"""Files that are complete or not there at all: written under a temporary name, then renamed. Reading them runs no code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedloom.errors import CheckpointError, DamagedCheckpoint

UNFINISHED = ".writing"
"""How the temporary name of a file that is being written ends; it begins with a dot."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], durable: bool = True) -> None:
    """A safetensors file. The same tensors and metadata give the same bytes.

    All metadata goes under one key, as JSON: safetensors writes several keys in an order that changes from run to run.
    Unless `durable`, the file outlives this process but perhaps not a power cut, until `flush`.
    Raises `CheckpointError` when it cannot be written, such as on a full disk; nothing is left of it then.
    """
    temporary = _temporary(path)
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        # Tensors that share memory (tied weights, views of one buffer) are refused by safetensors.
        if storage.data_ptr() in storages or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        owned[name] = plain
    try:
        save_file(owned, temporary, {"fedloom": json.dumps(dict(metadata), sort_keys=True)})
        _move(temporary, path, durable)
    except (SafetensorError, OSError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written ({_one_line(error)})") from None


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """An open safetensors file with its `keys()`, `metadata()` and `get_tensor(name)`, which may be a view of the file.

    Raises `DamagedCheckpoint` when the file is missing, cut short or not one at all.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({_one_line(error)})") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, apart from the file, and metadata of a file that `write_tensors` wrote.

    Raises `DamagedCheckpoint` as `open_tensors` does.
    """
    with open_tensors(path) as file:
        metadata = json.loads((file.metadata() or {}).get("fedloom", "{}"))
        return {name: file.get_tensor(name).clone() for name in file.keys()}, metadata  # noqa: SIM118


def write_text(path: Path, text: str) -> None:
    """A text file."""
    temporary = _temporary(path)
    temporary.write_text(text, encoding="utf-8")
    _move(temporary, path, durable=True)


def remove_unfinished(directory: Path) -> None:
    """Remove what a kill in the middle of a write left behind."""
    for path in directory.glob(f".*{UNFINISHED}"):
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file's content has reached the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def flush_directory(path: Path) -> None:
    """Wait until the names in a directory have reached the disk (where the system has a way to)."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{UNFINISHED}")


def _move(temporary: Path, path: Path, durable: bool) -> None:
    if durable:
        flush(temporary)
    temporary.replace(path)
    if durable:
        flush_directory(path.parent)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
