"""Pickled dictionaries of byte arrays, read without running anything that the file names."""

import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.data.formats.limits import read_bytes, reading
from fedloom.errors import DataError

Bytes = npt.NDArray[np.uint8]


class _Dtype:
    """Stand-in for `numpy.dtype` while unpickling: the one for unsigned bytes."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        if name not in ("u1", "|u1", b"u1", b"|u1"):
            raise pickle.UnpicklingError("an array that is not of unsigned bytes")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment, which single bytes do not have."""


class _Array:
    """Stand-in for `numpy.ndarray` while unpickling: checks shape, type and bytes."""

    values: Bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("an array without a type")
        self.values = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _from_buffer(raw: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


# The names that a file may use, and their harmless stand-ins.
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    # Python 3 writes bytes in the old protocols as text to encode so.
    ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")
        return allowed


def read_pickled_arrays(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of lists, text and uint8 arrays, without importing anything that it names."""
    with reading(path, "refused or damaged pickle"):
        content = read_bytes(path)
        _require_harmless(content)
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(batch, dict):
            raise DataError(f"{path}: a pickled {type(batch).__name__}, not a dictionary of arrays")
        return {
            key.decode("latin1") if isinstance(key, bytes) else str(key): getattr(value, "values", value)
            for key, value in batch.items()
        }


def _require_harmless(content: bytes) -> None:
    """Raise `UnpicklingError` for a pickle that takes more memory or time than its length allows."""
    tuples: set[int] = set()  # numbers of remembered objects
    remembered, previous = 0, ""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            number = remembered if opcode.name == "MEMOIZE" else int(argument or 0)
            # Python makes room for every number up to that of a remembered object.
            if number > len(content):
                raise pickle.UnpicklingError(f"object number {number} in {len(content)} bytes")
            remembered += 1
            if "TUPLE" in previous:
                tuples.add(number)
        # A tuple of two times one tuple, and so on, is hashed in 2^n steps.
        elif opcode.name == "DUP" or (opcode.name in ("GET", "BINGET", "LONG_BINGET") and int(argument or 0) in tuples):
            raise pickle.UnpicklingError("it uses a tuple twice")
        previous = opcode.name
