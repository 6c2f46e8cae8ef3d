"""Files that are complete or not there at all: written under a temporary name, then renamed."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedloom.errors import CheckpointError, DiskFull

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
            temporary.chmod(permissions)  # where the block put another file there
            if durable:
                flush(temporary)
            temporary.replace(path)
            if durable:
                flush_directory(path.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def slug(text: str) -> str:
    """A text as part of a file's name: `a (b, c)` is `a-b-c`."""
    return re.sub(r"[^\w.=]+", "-", text).strip("-")


def remove_unfinished(directory: Path) -> None:
    """Remove what killed writers left in this directory, but nothing that is being written, and no other file."""
    for folder in directory.glob(".*.writing"):
        if _UNFINISHED.fullmatch(folder.name) and folder.is_dir():
            with suppress(OSError), _locked(folder):  # a writer at work holds the lock
                shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, where the system can, at most until this process ends. Raises `BlockingIOError` when it is locked."""
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
    try:
        with replacing(path, mode=mode, durable=durable) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise not_written(path, error, len(content)) from None


def not_written(path: Path, error: OSError, needed: int) -> CheckpointError:
    """What to raise where `needed` bytes cannot be written to `path`."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(f"{path} cannot be written ({error.strerror or error})")
    return DiskFull(f"{path} cannot be written: the disk is full, and the file needs {needed:,} bytes")


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
