"""A cache of decoded data as safetensors, so that pictures are decoded and big json files parsed only once."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from fedloom.errors import CheckpointError, DamagedCheckpoint
from fedloom.state.digest import digest_of_json
from fedloom.state.files import remove_unfinished
from fedloom.state.tensors import read_tensors, write_tensors

_FORMAT = 2  # in every key: raise it when the content of the files changes


def cached(name: str, key: str, make: Callable[[], dict[str, Tensor]], files: Iterable[Path] = ()) -> dict[str, Tensor]:
    """Return `make()`, kept in the cache folder for (`name`, `key`) until one of `files` changes in size or time."""
    stamps = [(str(path.absolute()), status.st_size, status.st_mtime_ns) for path in files if (status := path.stat())]
    of = digest_of_json([_FORMAT, key, stamps])[:24]
    folder = Path(os.environ.get("FEDLOOM_CACHE") or Path.home() / ".cache" / "fedloom")
    path = folder / f"{name}-{of}.safetensors"
    with suppress(DamagedCheckpoint):
        return read_tensors(path, of=of)[0]
    tensors = make()
    with suppress(OSError, CheckpointError):
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        write_tensors(path, tensors, {"of": of}, durable=False)
    return tensors
