"""The idx format of MNIST and its relatives: a magic number, the dimensions, then bytes."""

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.data.formats.limits import reading, require_room
from fedloom.errors import DataError, quoted


def read_idx(path: Path) -> Tensor:
    """Read the uint8 tensor of an idx file, plain or packed with gzip."""
    # Y. LeCun, C. Cortes, C. Burges, the MNIST database, "file formats"
    with reading(path, "damaged gzip or idx file"), path.open("rb") as file:
        content = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        magic = content.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08":  # 8: unsigned bytes, the only element type of these data sets
            raise DataError(f"{path}: not an idx file of bytes (it begins with {magic.hex(' ') or 'nothing'})")
        sizes = content.read(4 * magic[3])
        shape = np.frombuffer(sizes, ">u4").tolist()
        count, header = math.prod(shape), 4 + len(sizes)
        require_room(count, path)
        elements = bytearray(content.read(count + 1))  # the tensor shares its memory; nothing beyond is unpacked
        if len(elements) != count:
            size = f"{header + len(elements)} bytes" + (" or more" if len(elements) > count else "")
            raise DataError(f"{path}: {size}, but an idx file of shape {quoted(shape)} has {header + count}")
        return torch.from_numpy(np.frombuffer(elements, np.uint8).reshape(shape))
