"""NumPy's files of arrays, read without running anything that is pickled in them."""

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from fedloom.data.formats.limits import reading, require_room
from fedloom.errors import quoted


def read_arrays(path: Path) -> dict[str, Any]:
    """Read the arrays of an npz file, or of the npy files in a folder, by name, but no Python objects."""
    arrays: dict[str, Any] = {}
    with reading(path, "damaged, or neither an npz file nor a folder of npy files"):
        if path.is_dir():
            files = sorted(path.glob("*.npy"))
            require_room(sum(file.stat().st_size for file in files), path)
            for file in files:
                with reading(file, "damaged npy file"):
                    arrays[file.stem] = np.load(file, allow_pickle=False)
        else:
            with path.open("rb") as opened, ZipFile(opened) as archive:
                require_room(sum(entry.file_size for entry in archive.infolist()), path)
                opened.seek(0)
                arrays = dict(np.load(opened, allow_pickle=False))
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) or not array.dtype.itemsize:
                raise ValueError(f"{quoted(name)} is no array")
    return arrays
