"""Decoded data kept as safetensors, so that pictures are decoded and big json files parsed only once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from fedloom.errors import CheckpointError, DamagedCheckpoint
from fedloom.state.files import remove_unfinished
from fedloom.state.tensors import read_tensors, write_tensors

_FORMAT = "1"  # part of every key: raise it when what is kept changes


def cache_folder() -> Path:
    """Where decoded data, compiled steps and trials of engines are kept: the environment variable FEDLOOM_CACHE, or
    ~/.cache/fedloom."""
    return Path(os.environ.get("FEDLOOM_CACHE") or Path.home() / ".cache" / "fedloom")


def file_stamp(paths: Iterable[Path]) -> str:
    """A key that changes with the path, size or time of change of any of `paths`."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        status = path.stat()
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def cached(name: str, key: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """`make()`, or what it gave when it was last called for (`name`, `key`).

    Kept in `<cache folder>/<name>-<digest of key>.safetensors`. A damaged file is made anew. Where the folder cannot
    be written nothing is kept; the next load only takes longer.
    """
    of = hashlib.blake2b(f"{_FORMAT}\0{key}".encode(), digest_size=12).hexdigest()
    path = cache_folder() / f"{name}-{of}.safetensors"
    if path.is_file():
        try:
            return read_tensors(path, of=of)[0]
        except DamagedCheckpoint:
            path.unlink(missing_ok=True)
    made = make()
    with suppress(OSError, CheckpointError):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent)
        write_tensors(path, made, {"of": of}, durable=False)
    return made
