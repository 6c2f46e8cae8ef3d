"""The idx format of MNIST and its relatives: a magic number, the dimensions, then bytes."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from fedloom.data.formats.plain_files import read_bytes
from fedloom.errors import DataError

_UNSIGNED_BYTES = 8  # the only element type that these data sets use


def read_idx(path: Path) -> Tensor:
    """The uint8 tensor in the idx file `path` (gzip is recognised by its first bytes).

    Layout: bytes 0, 0, element type, number of dimensions d; d big-endian 32-bit sizes; the elements, last dimension
    fastest. Raises `DataError` for a damaged gzip stream, another magic number or element type, or a wrong length.
    Source: Y. LeCun, C. Cortes, C. Burges, the MNIST database, "file formats".
    """
    content = _read(path)
    if len(content) < 4 or content[0] or content[1]:
        raise DataError(f"{path}: not an idx file (it begins with {content[:4].hex(' ') or 'nothing'})")
    if content[2] != _UNSIGNED_BYTES:
        raise DataError(f"{path}: idx element type 0x{content[2]:02x}, only unsigned bytes (0x08) are read")
    dimensions = content[3]
    header = 4 + 4 * dimensions
    if not dimensions or len(content) < header:
        raise DataError(f"{path}: idx header of {dimensions} dimensions in a file of {len(content)} bytes")
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4)]
    if len(content) != header + math.prod(shape):
        expected = header + math.prod(shape)
        raise DataError(f"{path}: {len(content)} bytes, but an idx file of shape {shape} has {expected}")
    if not math.prod(shape):
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(shape)


def _read(path: Path) -> bytearray:
    """Content of `path`, unpacked; a bytearray, because a tensor may share the memory of one without a copy."""
    content = read_bytes(path)
    try:
        return bytearray(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip file ({error})") from error
