"""The memory that a data set may take, whatever a file or an option claims, and the errors of
damaged files.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.common.errors import (
    LONGEST_QUOTED,
    DataError,
    FedloomError,
    InvalidValue,
    one_line,
    quoted,
)

VARIABLE = "FEDLOOM_DATA_GIB"
"""Environment variable of the most memory in GiB that one data set may take."""

DEFAULT = 4.0
"""More than any of the standard data sets takes."""


def allowed_bytes() -> int:
    """Return the most memory that one data set may take; raises `InvalidValue` if the environment
    variable is no number.
    """
    text = os.environ.get(VARIABLE) or str(DEFAULT)
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise InvalidValue(f"{VARIABLE} must be a number of GiB greater than 0, not {quoted(text)}")
    return int(size * 2**30)


def require_room(needed: int, source: Path | str, share: float = 1) -> None:
    """Raise `DataError` for data that take too much memory.

    Args:
        needed: Bytes that the data take.
        source: Name of the data.
        share: Share of the allowed memory that they may take.
    """
    needed = min(needed, 2**90)  # the sizes in a header may multiply to more than a float holds
    if needed > allowed_bytes() * share:
        takes, may, needs = (
            size / 2**30 for size in (needed, allowed_bytes() * share, needed / share)
        )
        raise DataError(
            f"{source}: takes {takes:,.2f} GiB of memory, more than the {may:,.2f} GiB that it "
            f"may take: set {VARIABLE} to more "
            f"than {needs:,.2f} if the data are meant to be so large"
        )


MOST_COLUMNS = 20_000
"""Columns of a table, at most: each takes time in every step, however little it holds."""


def require_columns(count: int, source: Path | str) -> None:
    """Raise `DataError` for a table with more than `MOST_COLUMNS`.

    Args:
        count: Number of columns.
        source: Name of the table.
    """
    if count > MOST_COLUMNS:
        raise DataError(
            f"{source}: {count:,} columns, more than the {MOST_COLUMNS:,} of a table: "
            "save the numbers as an array [rows, columns] in an npz file"
        )


@contextmanager
def reading(path: Path | str, damage: str) -> Iterator[None]:
    """Raise `DataError`, in one line, for errors while data are read.

    Args:
        path: File or name of the data. Devices and pipes are refused.
        damage: Text for errors of other libraries.

    Raises:
        DataError: The block fails, or the path is a device or a pipe.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{path}: cannot be read (it is a device or a pipe, which may have no end)")
    try:
        yield
    except InvalidValue as error:
        raise DataError(f"{path}: {error}") from None
    except FedloomError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        reason = one_line(str(error), LONGEST_QUOTED) or type(error).__name__
        raise DataError(f"{path}: {damage} ({reason})") from error


@contextmanager
def naming(source: Path | str) -> Iterator[None]:
    """Put the name of the data before a refusal that does not begin with it."""
    try:
        yield
    except (DataError, InvalidValue) as error:
        if str(error).startswith(f"{source}: "):
            raise
        raise type(error)(f"{source}: {error}") from None


def read_bytes(path: Path) -> bytes:
    """Read the bytes of `path`; raises `DataError` if it cannot be read, or takes more memory than
    it may.
    """
    with reading(path, "damaged file"):
        require_room(path.stat().st_size, path)
        return path.read_bytes()


def read_text(path: Path, kind: str = "text", share: float = 1) -> str:
    """Read a text file in UTF-8.

    Args:
        path: The file.
        kind: Kind of the text in errors.
        share: Share of the allowed memory that it may take.

    Returns:
        The whole text.

    Raises:
        DataError: The file cannot be read, is too large or is not UTF-8.
    """
    with reading(path, f"damaged {kind}"):
        require_room(path.stat().st_size, path, share)
        return path.read_text(encoding="utf-8")
