"""NumPy's files of arrays, read without running anything that is pickled in them."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

from fedloom.errors import DataError

# RuntimeError: a zip version or compression that does not exist; MemoryError: an array that claims to be larger than memory.
_DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


def read_arrays(path: Path) -> dict[str, Any]:
    """The arrays of an npz file, or of the npy files in a folder, by name.

    Raises `DataError` for a file that is missing, damaged, of another kind, or holds Python objects.
    """
    try:
        if path.is_dir():
            found = {file.stem: np.load(file, allow_pickle=False) for file in sorted(path.glob("*.npy"))}
        else:
            with path.open("rb") as file:  # NumPy leaves a file of its own open when the archive is damaged
                stored = np.load(file, allow_pickle=False)
                if not isinstance(stored, NpzFile):
                    raise DataError(f"{path}: a single array; wanted an npz file or a folder of npy files")
                with stored:
                    found = {key: stored[key] for key in stored.files}
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except _DAMAGE as error:
        raise DataError(f"{path}: damaged or not an npz or npy file ({' '.join(str(error).split())})") from error
    for name, array in found.items():
        if not isinstance(array, np.ndarray):  # NumPy hands out anything else in an archive as bytes
            raise DataError(f"{path}: {name!r} is not an array")
    return found
