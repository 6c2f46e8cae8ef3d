"""The idx format of MNIST and its relatives: a magic number, the dimensions, then bytes."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import torch
from torch import Tensor

from fedloom.data.formats.limits import reading, require_room
from fedloom.errors import DataError, quoted

_UNSIGNED_BYTES = 8  # the only element type that these data sets use


def read_idx(path: Path) -> Tensor:
    """The uint8 tensor in the idx file `path` (gzip is recognised by its first bytes).

    Layout: bytes 0, 0, element type, number of dimensions d; d big-endian 32-bit sizes; the elements, last dimension
    fastest. Raises `DataError` for a damaged gzip stream, another magic number or element type, or a wrong length.
    Source: Y. LeCun, C. Cortes, C. Burges, the MNIST database, "file formats".
    """
    with reading(path, "damaged gzip file"), path.open("rb") as file:
        content = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        start = content.read(4)
        if len(start) < 4 or start[0] or start[1]:
            raise DataError(f"{path}: not an idx file (it begins with {start.hex(' ') or 'nothing'})")
        if start[2] != _UNSIGNED_BYTES:
            raise DataError(f"{path}: idx element type 0x{start[2]:02x}, only unsigned bytes (0x08) are read")
        sizes = content.read(4 * start[3])
        if not sizes or len(sizes) < 4 * start[3]:
            raise DataError(f"{path}: idx header of {start[3]} dimensions in a file of {4 + len(sizes)} bytes")
        shape = [int.from_bytes(sizes[at : at + 4], "big") for at in range(0, len(sizes), 4)]
        count, header = math.prod(shape), 4 + len(sizes)
        require_room(count, path)
        elements = bytearray(content.read(count + 1))  # a tensor shares its memory; nothing beyond is unpacked
    if len(elements) != count:
        found = f"{header + len(elements)} bytes" + (" or more" if len(elements) > count else "")
        raise DataError(f"{path}: {found}, but an idx file of shape {quoted(shape)} has {header + count}")
    if not count:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(elements, dtype=torch.uint8).view(shape)
