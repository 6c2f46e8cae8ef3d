"""Exceptions that fedloom raises deliberately, and functions that format their texts."""

import difflib
import importlib
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

GRAPH_IS_GONE = "backward through the graph a second time"
"""Part of PyTorch's error when the graph of an earlier batch is differentiated again."""

LONGEST_QUOTED = 200
"""Largest number of characters of a value that an error quotes."""


class FedloomError(Exception):
    """Base class of all errors that a user can act on. Its text is one line."""


class InvalidValue(FedloomError, ValueError):
    """A value that is not allowed. The text names the value and the allowed values."""


class UnknownName(FedloomError, KeyError):
    """A name that is not registered. The text lists the most similar name and all names.

    >>> print(UnknownName("algorithm", "fedmrr", ["fedavg", "fedmr"]))
    unknown algorithm 'fedmrr': did you mean 'fedmr'? (there are: fedavg, fedmr)
    """

    def __init__(self, kind: str, name: str, registered: Iterable[str]) -> None:
        names = sorted(registered)
        super().__init__(
            f"unknown {kind} {quoted(name)}{suggestion(name, names)} (there are: "
            f"{', '.join(names)})"
        )

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr


class DataError(FedloomError):
    """A data file that is missing, damaged or in an unexpected format."""


class CheckpointError(FedloomError):
    """A run directory or checkpoint that cannot be continued."""


class DamagedCheckpoint(CheckpointError):
    """A file of a run that is missing or was changed after fedloom wrote it."""


class DiskFull(CheckpointError):
    """A file that exceeds the disk or the system's limit. The text gives its size."""


class MissingExtra(FedloomError, ImportError):
    """An optional dependency that is not installed. The text gives the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package!r}: {installing(extra)}")


class RefusedReply(FedloomError):
    """A client's reply with a wrong name, shape or type, or with a value that is not finite."""


class NotFinite(RefusedReply):
    """A reply with a value that is not finite: the client's training diverged."""


class Diverged(FedloomError):
    """Every reply of a round was refused because its values are not finite."""


def installing(extra: str) -> str:
    """Return the command that installs an extra.

    >>> installing("ray")
    "pip install -e '.[ray]' in the clone of fedloom"
    """
    return f"pip install -e '.[{extra}]' in the clone of fedloom"


def import_extra(package: str, extra: str, purpose: str) -> Any:
    """Import a package that an extra installs.

    Args:
        package: Import name, such as `flwr.client`.
        extra: Extra of fedloom that installs the package.
        purpose: Feature that needs the package, for the error.

    Returns:
        The module.

    Raises:
        MissingExtra: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingExtra(package.partition(".")[0], extra, purpose) from None


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return `": did you mean 'x'?"` for the most similar name, or "" if no name is similar.

    Args:
        name: The name that was not found.
        names: The names to choose from.

    Returns:
        Text to append to an error.
    """
    near = nearest(name, list(names), 0.5)
    return f": did you mean {near!r}?" if near else ""


def nearest(name: str, names: Collection[str], cutoff: float = 0.6) -> str:
    """Return the most similar name, or "" if no name is similar.

    A known abbreviation, such as `lr`, stands for its full name.

    Args:
        name: The name that was not found.
        names: The names to choose from.
        cutoff: Least similarity, in [0, 1], as in `difflib.get_close_matches`.

    Returns:
        A member of `names`, or "".
    """
    full = _ABBREVIATIONS.get(name, name)
    near = difflib.get_close_matches(
        (full if full in names else name)[:LONGEST_QUOTED], names, n=1, cutoff=cutoff
    )
    return near[0] if near else ""


_ABBREVIATIONS = {
    "lr": "learning_rate", "eta": "learning_rate", "wd": "weight_decay", "bs": "batch_size",
    "local_epochs": "epochs", "local_steps": "steps", "max_norm": "clip",
    "fraction_fit": "participation", "loss": "criterion",
}  # fmt: skip
"""Other common names for keys of a configuration."""


def quoted(value: object, write: Callable[[Any], str] = repr) -> str:
    r"""Return a value for an error text: on one line, at most its first 200 characters.

    >>> quoted("a\n" * 150)[-40:]
    "na\\na\\na\\na\\na\\na\\n'... (300 characters)"

    Args:
        value: Any value. Text is quoted and its control characters are escaped.
        write: Converts a value that is not text.

    Returns:
        The text. If it is shortened, the number of characters follows.
    """
    if isinstance(value, str):
        start = repr(value[:LONGEST_QUOTED])
        return start if len(value) <= LONGEST_QUOTED else f"{start}... ({len(value):,} characters)"
    try:
        text = write(value)
    # numbers with thousands of digits, or lists nested thousands of levels deep
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too long to show"
    return shortened(text)


def shortened(text: str) -> str:
    """Return the first 200 characters of a text without control characters.

    If the text is longer, its length follows.
    """
    start = printable(text[:LONGEST_QUOTED])
    return start if len(text) <= LONGEST_QUOTED else f"{start}... ({len(text):,} characters)"


def listed(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first texts of a list, and the number of the others, as in `a, b and 3 more`.

    Args:
        texts: The texts.
        most: Number of texts that are written. More are counted.
        separator: Text between two of them.
    """
    more = f"{separator.strip(', ')} and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if the text is empty."""
    return shortened(
        next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    )


def error_text(error: BaseException) -> str:
    """Return type, text and notes of a foreign error on one line.

    PyTorch's advice for a graph that was freed does not help here, so another text replaces it.
    """
    if GRAPH_IS_GONE in str(error):
        return (
            "a loss or a client half stores a tensor with the graph of an earlier batch: "
            "store value.detach()"
        )
    texts = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return " ".join("; ".join(texts).split())


def error_location(error: BaseException) -> str:
    """Return the line of the user's code that raised an error or its cause.

    This is the innermost line outside of fedloom, Python and installed packages.

    Returns:
        Such as `my_methods.py:12 in train`, or "" if no line is the user's.
    """
    if marked := getattr(error, _LOCATION, ""):
        return str(marked)
    if isinstance(error, SyntaxError) and error.filename and is_user_code(error.filename):
        return f"{shown_path(error.filename)}:{error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)
    ]
    if frames:
        function = "" if frames[-1].name.startswith("<") else f" in {frames[-1].name}"
        return f"{shown_path(frames[-1].filename)}:{frames[-1].lineno}{function}"
    return "" if error.__cause__ is None else error_location(error.__cause__)


def mark_location(error: BaseException) -> None:
    """Store the location of an error in it: a traceback does not reach other processes."""
    if location := error_location(error):
        setattr(error, _LOCATION, location)


def located(error: BaseException, text: str) -> str:
    """Return the text of an error with its location in the user's code.

    Args:
        error: The error, with its traceback.
        text: Text of the error.

    Returns:
        The text, unchanged if it contains the location already or no line is the user's.
    """
    location = error_location(error)
    return text if location in text else text + in_brackets(location)


def in_brackets(location: str) -> str:
    """Return a location in brackets to append to a sentence, or "" for ""."""
    return location and f" (at {location})"


def is_user_code(file: str) -> bool:
    """Return True if a file or notebook cell contains the user's code.

    Code of fedloom, of Python and of installed packages is not the user's.
    """
    # the cache contains the lines of a notebook cell, but at most a loader for compiled code
    is_cell = len(linecache.cache.get(file, ())) > 1
    return not file.startswith(_installed()) and (os.path.isfile(file) or is_cell)


def shown_path(file: str) -> str:
    """Return a path relative to the current folder if it is inside.

    The code of a notebook cell is in no file: the text is then "notebook cell".
    """
    path = Path(file)
    if not path.exists():
        return "notebook cell"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def code_location(definition: Any) -> str:
    """Return the file and line of the user's class or function, or "" if it is not the user's.

    A class in a notebook has no source file, so its first function gives the line.
    """
    if inspect.isclass(definition) and not hasattr(
        sys.modules.get(definition.__module__), "__file__"
    ):
        definition = next(filter(inspect.isfunction, vars(definition).values()), definition)
    try:
        file = inspect.getsourcefile(definition) or ""
        line = inspect.getsourcelines(definition)[1]
    except (OSError, TypeError):  # typed at a prompt, or built in
        return ""
    return f"{shown_path(file)}:{line}" if is_user_code(file) else ""


_LOCATION = "fedloom_location"
"""Attribute of an error that stores its location."""


@cache
def _installed() -> tuple[str, ...]:
    paths = [
        sysconfig.get_path(name)
        for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    ]
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return (package + os.sep, *(path + os.sep for path in paths))


def one_line(text: str, longest: int = 500) -> str:
    """Return foreign text for a log: on one line, without control characters, shortened.

    Args:
        text: Any text, such as an error message of a site.
        longest: Largest number of characters of the result.

    Returns:
        The text. Spaces and line breaks become single spaces.
    """
    return " ".join(printable(text[: 4 * longest]).split())[:longest]


def printable(text: str) -> str:
    """Return a text with a space in place of each character that is not printable.

    These are control characters, line ends and marks of the writing direction, which steer a
    terminal, and lone surrogates, which no file can contain.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
