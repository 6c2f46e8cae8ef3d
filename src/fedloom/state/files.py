"""Files that are complete or not there at all: written under a temporary name, then renamed. Reading them runs no code."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedloom.errors import CheckpointError, DamagedCheckpoint

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.writing")
"""The folder in which `replacing` writes: the file's own name, then letters that no other writer has."""


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[Path]:
    """An empty file to write, which takes the place of `path` when the block ends, or vanishes when the block fails.

    Several writers of one path do not disturb each other: the last one to end is the one whose file stays. `mode` is that of a
    new file, from its first byte on. Unless `durable`, the file outlives this process but perhaps not a power cut, until
    `flush`. A writer that is killed leaves a folder behind, for `remove_unfinished`.
    """
    folder = path.with_name(f".{path.name}.{secrets.token_hex(8)}.writing")
    folder.mkdir(mode=0o700)
    with _locked(folder):
        try:
            temporary = folder / path.name
            temporary.touch(mode)
            permissions = temporary.stat().st_mode
            yield temporary
            temporary.chmod(permissions)  # safetensors puts a file of its own there, for the owner alone
            if durable:
                flush(temporary)
            temporary.replace(path)
            if durable:
                flush_directory(path.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Remove what writers left in this directory that were killed, but nothing that is being written, and no other file."""
    for folder in directory.glob(".*.writing"):
        if _UNFINISHED.fullmatch(folder.name) and folder.is_dir():
            with suppress(OSError), _locked(folder):  # a writer at work holds the lock
                shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder alone, where the system can lock one; the lock ends with this process. Raises `BlockingIOError` when another
    holds it."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """A text file. Raises `CheckpointError` when it cannot be written."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """A file of these bytes; `mode` and `durable` as in `replacing`. Raises `CheckpointError` when it cannot be written."""
    with _explained(path), replacing(path, mode=mode, durable=durable) as temporary:
        temporary.write_bytes(content)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written ({_one_line(error)})") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], durable: bool = True) -> None:
    """A safetensors file. The same tensors and metadata give the same bytes.

    All metadata goes under one key, as JSON: safetensors writes several keys in an order that changes from run to run.
    `durable` as in `replacing`. Raises `CheckpointError` when it cannot be written, such as on a full disk.
    """
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
    with _explained(path), replacing(path, durable=durable) as temporary:
        save_file(owned, temporary, {"fedloom": json.dumps(dict(metadata), sort_keys=True)})


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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
