"""A cache of decoded data as safetensors, so that pictures are decoded and big json files parsed only once."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from fedloom.errors import CheckpointError, DamagedCheckpoint
from fedloom.state.digest import Digest, digest
from fedloom.state.files import remove_unfinished
from fedloom.state.tensors import read_tensors, write_tensors

_FORMAT = "1"  # in every key: raise it when the content of the files changes


def file_stamp(paths: Iterable[Path]) -> str:
    """Return a key that changes with the path, size or time of change of any of `paths`."""
    stamp = Digest()
    for path in paths:
        status = path.stat()
        stamp.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return stamp.hexdigest()[:32]


def cached(name: str, key: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return `make()`, kept in a file of the cache folder for (`name`, `key`). A damaged file is made anew."""
    of = digest(f"{_FORMAT}\0{key}")[:24]
    folder = Path(os.environ.get("FEDLOOM_CACHE") or Path.home() / ".cache" / "fedloom")
    path = folder / f"{name}-{of}.safetensors"
    if path.is_file():
        try:
            return read_tensors(path, of=of)[0]
        except DamagedCheckpoint:
            path.unlink(missing_ok=True)
    tensors = make()
    with suppress(OSError, CheckpointError):
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        write_tensors(path, tensors, {"of": of}, durable=False)
    return tensors
