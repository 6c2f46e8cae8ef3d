"""Every error that fedloom raises on purpose."""

import difflib
import importlib
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

GRAPH_IS_GONE = "backward through the graph a second time"
"""PyTorch's words where an earlier batch's graph is differentiated again."""

LONGEST_QUOTED = 200
"""Characters of a value, at most, that an error quotes."""


class FedloomError(Exception):
    """Base of all errors that a user can act on. Its text is one line."""


class InvalidValue(FedloomError, ValueError):
    """A value that is not allowed; the text names the value and what is allowed."""


class UnknownName(FedloomError, KeyError):
    """A name that is not registered; the text names the nearest one and all there are.

    >>> print(UnknownName("algorithm", "fedmrr", ["fedavg", "fedmr"]))
    unknown algorithm 'fedmrr': did you mean 'fedmr'? (there are: fedavg, fedmr)
    """

    def __init__(self, kind: str, name: str, registered: Iterable[str]) -> None:
        names = sorted(registered)
        super().__init__(
            f"unknown {kind} {quoted(name)}{suggestion(name, names)} (there are: {', '.join(names)})"
        )

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr


class DataError(FedloomError):
    """A file of data that is missing, damaged or in another format."""


class CheckpointError(FedloomError):
    """A run directory or checkpoint that cannot be continued."""


class DamagedCheckpoint(CheckpointError):
    """A file of a run that is missing, or not as it was written."""


class DiskFull(CheckpointError):
    """A file for which the disk has no room, or that is larger than the system allows; the text
    says its bytes.
    """


class MissingExtra(FedloomError, ImportError):
    """An optional dependency that is not installed; the text says what to install."""

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
    """Import a package that an extra installs. Raises `MissingExtra` where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingExtra(package.partition(".")[0], extra, purpose) from None


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return `": did you mean 'x'?"` for the nearest of the names, or "" when none is near."""
    near = nearest(name, list(names), 0.5)
    return f": did you mean {near!r}?" if near else ""


def nearest(name: str, names: Collection[str], cutoff: float = 0.6) -> str:
    """Return the name that an abbreviation stands for, or else the most similar one; "" where none
    is near.
    """
    full = _ABBREVIATIONS.get(name, name)
    near = difflib.get_close_matches(
        (full if full in names else name)[:LONGEST_QUOTED], names, n=1, cutoff=cutoff
    )
    return near[0] if near else ""


_ABBREVIATIONS = {
    "lr": "learning_rate", "eta": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "local_epochs": "epochs",
    "local_steps": "steps", "max_norm": "clip", "fraction_fit": "participation", "loss": "criterion",
}  # fmt: skip
"""Other words of the field for keys of a configuration."""


def quoted(value: object, write: Callable[[Any], str] = repr) -> str:
    r"""Return a value as errors quote it: on one line, and at most its first 200 characters.

    >>> quoted("a\n" * 150)[-40:]
    "a\\na\\na\\na\\na\\na\\na\\n'... (300 characters)"
    """
    if isinstance(value, str):
        start = repr(value[:LONGEST_QUOTED])
        return start if len(value) <= LONGEST_QUOTED else f"{start}... ({len(value):,} characters)"
    try:
        text = write(value)
    # a number of thousands of digits, lists in thousands of lists
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too long to show"
    return shortened(text)


def shortened(text: str) -> str:
    """Return the first 200 characters of a text, without control characters, and its length where
    there are more.
    """
    start = printable(text[:LONGEST_QUOTED])
    return start if len(text) <= LONGEST_QUOTED else f"{start}... ({len(text):,} characters)"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; its type where it has none."""
    return shortened(
        next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    )


def error_text(error: BaseException) -> str:
    """Return type and text of an error that fedloom did not raise, on one line; what is wrong where
    its remedy is none.
    """
    if GRAPH_IS_GONE in str(error):
        return "what a loss or a client half keeps of an earlier batch holds that batch's graph: keep value.detach()"
    return " ".join(f"{type(error).__name__}: {error}".split())


def error_location(error: BaseException) -> str:
    """Return the line of the user's code in which an error or its cause arose, `my_methods.py:12 in
    train`, or "".

    That is the innermost line outside of fedloom, Python and installed packages.
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
    """Store the location of an error in it before it goes to another process, without its
    traceback.
    """
    if location := error_location(error):
        setattr(error, _LOCATION, location)


def located(error: BaseException, text: str) -> str:
    """Return the text of an error with its location in the user's code."""
    location = error_location(error)
    return text if location in text else text + in_brackets(location)


def in_brackets(location: str) -> str:
    """Return a location as it follows a sentence; "" for ""."""
    return location and f" (at {location})"


def is_user_code(file: str) -> bool:
    """Return True if a file of code, or a cell of a notebook, is the user's: not fedloom's, not
    Python's, and not installed.
    """
    # a cell of a notebook has its lines in the cache; compiled code has a loader alone, or none
    is_cell = len(linecache.cache.get(file, ())) > 1
    return not file.startswith(_installed()) and (os.path.isfile(file) or is_cell)


def shown_path(file: str) -> str:
    """Return a path relative to the current folder, if it is inside; the code of a cell lies in no
    file.
    """
    path = Path(file)
    if not path.exists():
        return "notebook cell"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def code_location(definition: Any) -> str:
    """Return the line of a class (in a notebook: of its first function) or function of the user's;
    "" for fedloom's.
    """
    if inspect.isclass(definition) and not hasattr(
        sys.modules.get(definition.__module__), "__file__"
    ):
        definition = next(filter(inspect.isfunction, vars(definition).values()), definition)
    try:
        file, line = inspect.getsourcefile(definition) or "", inspect.getsourcelines(definition)[1]
    except (OSError, TypeError):  # typed at a prompt, or built in
        return ""
    return f"{shown_path(file)}:{line}" if is_user_code(file) else ""


_LOCATION = "fedloom_location"
"""The attribute of an error that stores its location."""


@cache
def _installed() -> tuple[str, ...]:
    paths = [
        sysconfig.get_path(name)
        for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    ]
    return (os.path.dirname(os.path.abspath(__file__)) + os.sep, *(path + os.sep for path in paths))


def one_line(text: str, longest: int = 500) -> str:
    """Return foreign text for a log: on one line, without control characters, at most `longest`
    characters.
    """
    return " ".join(printable(text[: 4 * longest]).split())[:longest]


def printable(text: str) -> str:
    """Return a text with a space for each character that steers a terminal or is none.

    These are control characters, line ends, marks of the writing direction, and lone surrogates,
    which no file can hold.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
