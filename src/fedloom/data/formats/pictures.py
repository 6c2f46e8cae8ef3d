"""JPEG, PNG and other pictures, decoded on several threads into one tensor of bytes."""

import io
import math
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedloom.data.formats.limits import read_bytes, reading, require_room
from fedloom.errors import DataError

Pixels = npt.NDArray[np.uint8]
_MODES = {1: "L", 3: "RGB"}
_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
)
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_BYTES_A_PIXEL = 4  # while it is decoded, whatever its mode
# of the memory of a data set that one picture may take: 67 million pixels by default
_SHARE = 1 / 16
_CHUNK = 500  # pictures a task: long enough that handing out tasks costs nothing


def decode_images(
    count: int,
    content: Callable[[int], bytes | None],
    name: Callable[[int], str],
    channels: int,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Decode pictures on several threads to uint8 `[count, channels, height, width]`, scaled to
    `size` if given.
    """
    if not count:
        return torch.empty((0, channels, *(size or (0, 0))), dtype=torch.uint8)
    if size is not None:
        require_room(count * channels * math.prod(size), name(0))
    # Pillow warns of large pictures and decodes them all the same; `require_room` decides instead.
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        shape = _decode(content(0), name(0), channels, size).shape
        require_room(count * math.prod(shape), name(0))
        pixels = np.empty((count, *shape), dtype=np.uint8)

        def decode_chunk(start: int) -> None:
            for row in range(start, min(start + _CHUNK, count)):
                image = _decode(content(row), name(row), channels, size)
                if image.shape != shape:
                    extents = [f"{height} x {width}" for _, height, width in (image.shape, shape)]
                    raise DataError(
                        f"{name(row)}: {extents[0]} pixels, but {name(0)} has {extents[1]}"
                    )
                pixels[row] = image

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            # which cancels the others after an error
            list(pool.map(decode_chunk, range(0, count, _CHUNK)))
    return torch.from_numpy(pixels)


def open_picture(content: bytes) -> Image.Image:
    """Open a picture in one of the formats that Pillow decodes itself: for others it starts
    programs that interpret them.
    """
    return Image.open(io.BytesIO(content), formats=_FORMATS)


def _decode(
    content: bytes | None, name: str, channels: int, size: tuple[int, int] | None
) -> Pixels:
    if content is None:
        raise DataError(f"{name}: no picture")
    with reading(name, "unreadable picture"):
        try:
            opened = open_picture(content)
        except UnidentifiedImageError as error:
            raise DataError(f"{name}: not a picture in a known format") from error
        with opened as picture:
            require_room(picture.width * picture.height * _BYTES_A_PIXEL, name, _SHARE)
            image = picture.convert(_MODES[channels])
            if size is not None:
                image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def read_files(paths: Sequence[Path], channels: int, size: tuple[int, int] | None = None) -> Tensor:
    """Decode picture files to uint8 `[n, channels, height, width]`; raises as `decode_images`."""
    return decode_images(
        len(paths), lambda row: read_bytes(paths[row]), lambda row: str(paths[row]), channels, size
    )


def class_folders(root: Path) -> list[str]:
    """Return the names of the folders in `root`, sorted: the classes of an image folder."""
    return sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def pictures(folder: Path) -> list[Path]:
    """Return the picture files in `folder`, sorted."""
    return sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in _SUFFIXES)
