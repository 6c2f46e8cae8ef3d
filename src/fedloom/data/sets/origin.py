"""Origins of standard data sets: the user's folder, the folder of all data, or the Hugging Face
hub.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fedloom.common.digest import digest_of_json
from fedloom.common.errors import CheckpointError, DamagedCheckpoint, DataError, installing
from fedloom.data.dataset import Samples
from fedloom.data.formats.limits import reading
from fedloom.data.sets.normalisation import Split
from fedloom.state.files import remove_unfinished
from fedloom.state.tensors import read_tensors, write_tensors

T = TypeVar("T")
_SUBFOLDERS = ("", "raw", "gzip", "data", "plain_text")
_FORMAT = 3  # in every key of the cache: raise it when the content of the files changes
_SPLITS = ("train", "test")
_FIELDS = ("inputs", "labels", "groups")


def load(
    name: str,
    folders: Sequence[str],
    files: str,
    read: Callable[[Path], T | None],
    fetch: Callable[[], T] | None,
    folder: str | None,
    hub: bool,
) -> T:
    """Return a set from a folder, or from the hub if `hub` is set.

    Args:
        name: Name of the set.
        folders: Names of the folder that holds it.
        files: Its files, for the error about a missing set.
        read: Reads a folder; None if it does not hold the set.
        fetch: Downloads the set; None if the hub has none.
        folder: Folder of the user; by default the environment variable FEDLOOM_DATA.
        hub: Download the set if no folder holds it.

    Returns:
        The value that `read` or `fetch` returned.

    Raises:
        DataError: The set is not found; the text has the `files` to get.
    """
    if folder is not None and not Path(folder).is_dir():
        raise DataError(f"{folder}: no such folder (wanted for {name})")
    for candidate in candidates(folders, folder):
        with reading(candidate, f"damaged folder of {name}"):
            content = read(candidate)
        if content is not None:
            return content
    if fetch is not None and hub:
        return fetch()
    root = folder or os.environ.get("FEDLOOM_DATA")
    searched = f"not in {root}" if root else "no folder given and FEDLOOM_DATA is not set"
    download = "" if fetch is None else f", or {installing('hub')} and set hub=true to download it"
    raise DataError(
        f"{name}: {searched}; put {files} in FOLDER or FOLDER/{folders[0]}"
        f" and set folder or FEDLOOM_DATA to FOLDER{download}"
    )


def cached_split(
    name: str, key: str, make: Callable[[], Split], files: Sequence[Path] = ()
) -> Split:
    """Return the result of `make`, and save it in the cache folder.

    Args:
        name: Name of the set.
        key: Identity of the samples within the set.
        make: Reads the samples.
        files: Files that are read: a change of size or time makes the saved samples invalid.

    Returns:
        Training and test samples, from the cache if it has them.
    """
    stamps = [
        (str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files
    ]
    of = digest_of_json([_FORMAT, key, stamps])[:24]
    folder = Path(os.environ.get("FEDLOOM_CACHE") or Path.home() / ".cache" / "fedloom")
    path = folder / f"{name}-{of}.safetensors"
    with suppress(DamagedCheckpoint):
        stored: dict[str, Any] = read_tensors(path, of=of)[0]
        train, test = (
            Samples(**{field: stored.get(f"{split}.{field}") for field in _FIELDS})
            for split in _SPLITS
        )
        return train, test
    samples = make()
    tensors = {
        f"{split}.{field}": tensor
        for split, part in zip(_SPLITS, samples, strict=True)
        for field in _FIELDS
        if (tensor := getattr(part, field)) is not None
    }
    with suppress(OSError, CheckpointError):
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        write_tensors(path, tensors, {"of": of}, durable=False)
    return samples


def files_named(folder: Path, names: Sequence[str]) -> list[Path] | None:
    """Return files in a folder, each plain or with `.gz`.

    Args:
        folder: The folder.
        names: Names of the files.

    Returns:
        The paths; None if the folder has none of them.

    Raises:
        DataError: Only some of the files are there.
    """
    files = [
        next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
        for name in names
    ]
    if not any(files):
        return None
    for name, path in zip(names, files, strict=True):
        if path is None:
            raise DataError(f"{folder / name}: missing, though other files of the set are there")
    return [path for path in files if path is not None]


def parquet_files(
    folder: Path, train: str = "train", test: str = "test"
) -> tuple[list[Path], list[Path]] | None:
    """Return the parquet files of both splits.

    Args:
        folder: The folder.
        train: Beginning of the names of training files.
        test: Beginning of the names of test files.

    Returns:
        Training and test files; None without some of both.
    """
    files = [sorted(folder.glob(f"{split}*.parquet")) for split in (train, test)]
    return (files[0], files[1]) if all(files) else None


def candidates(folders: Sequence[str], folder: str | None) -> Iterator[Path]:
    """Yield the folders that exist and may hold a set.

    Args:
        folders: Names of the folder that holds it.
        folder: Folder of the user; by default the environment variable FEDLOOM_DATA.

    Yields:
        Folders in the order in which they are searched.
    """
    base = folder or os.environ.get("FEDLOOM_DATA")
    if not base:
        return
    root = Path(base)
    bases = [root / name for name in folders]
    # Several sets use the same file names: the folder of all data counts as this set's only if its
    # path has its name.
    if folder is not None or {name.lower() for name in root.parts[-2:]} & {
        name.lower() for name in folders
    }:
        bases.append(root)
    yield from (path for base in bases for name in _SUBFOLDERS if (path := base / name).is_dir())
