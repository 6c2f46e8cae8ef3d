"""Pickled dictionaries of bytes and lists of whole numbers: their opcodes are read one by one, and nothing is built or run."""

import pickletools
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedloom.data.formats.limits import read_bytes, reading


def read_pickle(path: Path, columns: int) -> tuple[npt.NDArray[np.uint8], dict[str, list[int]]]:
    """Return the longest string of bytes in a pickle as rows of `columns` bytes, and the whole numbers after each text."""
    raw, key, by_column, flag = b"", "", False, False
    numbers: dict[str, list[int]] = {}
    with reading(path, "damaged pickle"):
        for opcode, argument, _ in pickletools.genops(read_bytes(path)):
            kinds = " ".join(kind.name for kind in opcode.stack_after)
            if isinstance(argument, str | bytes | bytearray):
                text = argument if isinstance(argument, str) else argument.decode("latin-1")
                if len(text) > len(
                    raw
                ):  # NumPy's flag of arrays by column precedes their bytes, or its letter F follows
                    raw, by_column = text.encode("latin-1", "replace"), flag
                key, by_column = text[:100], by_column or text == "F"
            elif type(argument) is int and "int" in kinds:
                numbers.setdefault(key, []).append(argument)
            elif "bool" in kinds:
                flag = opcode.name == "NEWTRUE" or argument is True
    with reading(path, f"no rows of {columns} bytes"):
        rows = len(raw) // columns, columns
        return np.frombuffer(raw, np.uint8).reshape(rows, order="F" if by_column else "C"), numbers
