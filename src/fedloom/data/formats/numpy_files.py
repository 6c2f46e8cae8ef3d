"""NumPy's files of arrays, read without running anything that is pickled in them."""

import math
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
from numpy.lib import format as npy

from fedloom.common.errors import DataError, quoted
from fedloom.data.formats.limits import reading, require_room


def read_arrays(path: Path) -> dict[str, Any]:
    """Read the arrays of an npz file, or of the npy files in a folder, by name, but no Python
    objects.
    """
    arrays: dict[str, Any] = {}
    with reading(path, "damaged, or neither an npz file nor a folder of npy files"):
        if path.is_dir():
            files = sorted(path.glob("*.npy"))
            require_room(sum(file.stat().st_size for file in files), path)
            for member in files:
                with reading(member, "damaged npy file"), member.open("rb") as file:
                    arrays[member.stem] = _array(
                        file, member.stat().st_size, f"{path}: {quoted(member.stem)}"
                    )
            return arrays
        with path.open("rb") as file, ZipFile(file) as archive:
            require_room(sum(entry.file_size for entry in archive.infolist()), path)
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                with archive.open(entry) as unpacked:
                    arrays[name] = _array(unpacked, entry.file_size, f"{path}: {quoted(name)}")
    return arrays


def _array(file: IO[bytes], size: int, source: str) -> np.ndarray[Any, Any]:
    """Read the array in an npy file of `size` bytes; its header cannot claim more elements than
    that holds.
    """
    read_header = (
        npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    )
    shape, _, dtype = read_header(file)
    if not dtype.hasobject:  # which `read_array` refuses
        valid = all(type(extent) is int and extent >= 0 for extent in shape)
        if (
            not valid
            or not dtype.itemsize
            or file.tell() + math.prod(shape) * dtype.itemsize != size
        ):
            raise DataError(
                f"{source}: damaged: an array of {dtype} of shape {quoted(shape)} in {size} bytes"
            )
    file.seek(0)
    array: np.ndarray[Any, Any] = npy.read_array(file, allow_pickle=False)
    return array
