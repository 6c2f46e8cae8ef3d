"""Files that are complete or absent: written under a temporary name, then renamed."""

import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedloom.common.errors import CheckpointError, DiskFull

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags to open a file: a pipe without a writer would wait."""

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.writing")
"""Folder in which `replacing` writes: the file's name, then letters unique to the writer."""


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[Path]:
    """Yield an empty file to write, which replaces `path` at the end of the block.

    If the block fails, the file is removed. Several writers of one path do not disturb each other:
    the file of the last writer to end remains. A killed writer leaves a folder behind, which
    `remove_unfinished` removes.

    Args:
        path: The file to replace.
        mode: Permissions of a new file, from its first byte on.
        durable: Wait until the file is on the disk. If False, it survives the end of this process,
            but possibly not a power cut, until `flush`.

    Yields:
        The path to write to.
    """
    folder = path.with_name(f".{path.name}.{secrets.token_hex(8)}.writing")
    folder.mkdir(mode=0o700)
    with _locked(folder):
        try:
            temporary = folder / path.name
            temporary.touch(mode)
            permissions = temporary.stat().st_mode
            yield temporary
            temporary.chmod(permissions)  # the block may have replaced the file
            if durable:
                flush(temporary)
            temporary.replace(path)
            if durable:
                flush(path.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its missing parents.

    Args:
        path: The folder; nothing happens if it exists.
        mode: Permissions of a new folder. The parents have the default of the process.

    Raises:
        CheckpointError: The folder cannot be made.
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"folder {path} cannot be made ({error.strerror or error})") from None


def temporary_folder(owner: object, kind: str) -> Path:
    """Make a folder for files of this kind. It is removed with its owner or this process.

    Args:
        owner: The object that uses the files. The folder is removed when it is garbage collected.
        kind: A word for the folder's name, such as `pool`.

    Returns:
        The folder, below the system's folder for temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"fedloom-{kind}-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove(path: Path) -> None:
    """Remove a file if it exists. A folder of this name was not made by fedloom, and remains."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)


def slug(text: str) -> str:
    """Return a text as a part of a file name: `a (b, c)` is `a-b-c`."""
    return re.sub(r"[^\w.=]+", "-", text).strip("-")


def remove_unfinished(directory: Path) -> None:
    """Remove the folders of killed writers in this directory, but of no active writer."""
    if fcntl is None:
        return  # without locks, a folder may be of an active writer
    for folder in directory.glob(".*.writing"):
        if _UNFINISHED.fullmatch(folder.name) and folder.is_dir():
            with suppress(OSError), _locked(folder):  # an active writer has the lock
                shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder until the block or this process ends; without `fcntl`, nothing is locked.

    Raises:
        BlockingIOError: The folder is locked.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def read_file(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: The file cannot be read, or is a pipe or a device, which may have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file, but a pipe, a device or a folder", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file.

    Args:
        path: The file. An existing file is replaced.
        text: The content, encoded as UTF-8.

    Raises:
        CheckpointError: The file cannot be written.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Write a file, completely or not at all.

    Args:
        path: The file. An existing file is replaced.
        content: All its bytes.
        mode: As in `replacing`.
        durable: As in `replacing`.

    Raises:
        CheckpointError: The file cannot be written.
    """
    try:
        with replacing(path, mode=mode, durable=durable) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise not_written(path, error, len(content)) from None


def append_line(path: Path, line: bytes, *, durable: bool = True) -> None:
    """Append a line, completely or not at all.

    Args:
        path: The file. A missing file is made.
        line: The bytes to append, with the line break at the end.
        durable: As in `replacing`.

    Raises:
        CheckpointError: The line cannot be written.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(line)
        if durable:
            flush(path)
            if size == 0:
                flush(path.parent)
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, size)
        raise not_written(path, error, len(line)) from None


def not_written(path: Path, error: OSError, size: int) -> CheckpointError:
    """Return the error to raise if `size` bytes cannot be written to `path`.

    Args:
        path: The file, for the message.
        error: The system's error.
        size: Bytes that the writer needed.

    Returns:
        `DiskFull` if the disk or the quota is full or the file is too large, else a plain
        `CheckpointError`.
    """
    reason = error.strerror or error
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(f"{path} cannot be written: it needs {size:,} bytes ({reason})")
    return CheckpointError(f"{path} cannot be written ({reason})")


def flush(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, have reached the disk."""
    if fcntl is None and path.is_dir():
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if fcntl else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
