"""The contents of a file, or one line that says why there are none."""

from __future__ import annotations

from pathlib import Path

from fedloom.errors import DataError


def read_bytes(path: Path) -> bytes:
    """The bytes of `path`. Raises `DataError` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_text(path: Path, kind: str = "text") -> str:
    """The text of `path`. Raises `DataError` where it cannot be read or is not UTF-8, so no `kind` of file."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: damaged {kind} ({error})") from error
