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
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fedloom.common.errors import DataError
from fedloom.data.formats.limits import read_bytes, reading, require_room

Pixels = npt.NDArray[np.uint8]
_MODES = {1: "L", 3: "RGB"}
_SUFFIXES = frozenset(
    [
        ".png",
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".bmp",
        ".dib",
        ".gif",
        ".webp",
        ".tif",
        ".tiff",
        ".pbm",
        ".pgm",
        ".ppm",
        ".pnm",
    ]
)
_NO_CLASSES = "__MACOSX"  # of archives that macOS packs
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
    """Decode pictures on several threads.

    Args:
        count: Number of pictures.
        content: Returns the bytes of a picture by its number, None for none.
        name: Returns the name of a picture in errors.
        channels: 1 (grey) or 3 (colour).
        size: Height and width to scale to; without it all must have one size.

    Returns:
        Pixels `[count, channels, height, width]` uint8.

    Raises:
        DataError: A picture is unreadable, too large or of another size.
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
            image = _eight_bits(picture, name)
            ImageOps.exif_transpose(image, in_place=True)
            image = image.convert(_MODES[channels])
            if size is not None:
                image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _eight_bits(picture: Image.Image, name: str) -> Image.Image:
    """Return grey levels of 16 bits over 257, floats between 0 and 1 times 255, and pictures of 8
    bits unchanged. Raises `DataError` for others, since Pillow would cut them at 255.
    """
    is_short = picture.mode.startswith("I;16")
    is_short = is_short or (picture.mode == "I" and picture.format in ("PNG", "PPM"))
    if not is_short and picture.mode not in ("I", "F"):
        return picture
    values = np.asarray(picture)
    if is_short:
        levels = values / 257
    elif picture.mode == "F" and 0 <= values.min() <= values.max() <= 1:
        levels = values * 255
    else:
        raise DataError(
            f"{name}: levels from {values.min():g} to {values.max():g} of 32 bits have no rule "
            "for 8 bits: store them as "
            "8 or 16 bits, or as floats from 0 to 1"
        )
    return Image.fromarray(levels.round().astype(np.uint8))


def read_files(paths: Sequence[Path], channels: int, size: tuple[int, int] | None = None) -> Tensor:
    """Decode picture files.

    Args:
        paths: The `n` files.
        channels: 1 (grey) or 3 (colour).
        size: Height and width to scale to.

    Returns:
        Pixels `[n, channels, height, width]` uint8.

    Raises:
        DataError: As `decode_images`.
    """
    return decode_images(
        len(paths), lambda row: read_bytes(paths[row]), lambda row: str(paths[row]), channels, size
    )


def class_folders(root: Path) -> list[str]:
    """Return the names of the folders in `root`, sorted: the classes of an image folder."""
    return sorted(
        entry.name
        for entry in root.iterdir()
        if entry.is_dir() and not entry.name.startswith(".") and entry.name != _NO_CLASSES
    )


def pictures(folder: Path) -> list[Path]:
    """Return the picture files in `folder` and its folders, sorted."""
    return [path for path in visible_files(folder) if path.suffix.lower() in _SUFFIXES]


def visible_files(folder: Path) -> list[Path]:
    """Return the files in `folder` and its folders, sorted, without hidden ones."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(
            part.startswith(".") or part == _NO_CLASSES for part in path.relative_to(folder).parts
        )
    )
