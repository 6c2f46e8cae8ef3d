"""Every error that fedloom raises on purpose.

FedloomError                the user can act on it; the command line prints it as one line
├── InvalidValue            a value that is not allowed (also a ValueError)
├── UnknownName             a name that nothing is registered under (also a KeyError)
├── DataError               a file of data that is missing, damaged or in another format
├── CheckpointError         a run directory or checkpoint that cannot be continued
│   ├── DamagedCheckpoint   a file of a run that is missing, or not as it was written
│   └── DiskFull            a file for which the disk has no room
├── MissingExtra            an optional dependency that is not installed
├── RefusedReply            a client's reply that has a wrong name, shape, type or a value that is not finite
│   └── NotFinite           a reply with a value that is not finite: the client's training diverged
└── Diverged                every client's reply was refused as not finite: the run cannot go on
"""

from __future__ import annotations

import difflib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

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

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        super().__init__(f"unknown {kind} {quoted(name)}{suggestion(name, names)} (there are: {', '.join(names)})")

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr


class DataError(FedloomError):
    """A file of data that is missing, damaged or in another format."""


class CheckpointError(FedloomError):
    """A run directory or checkpoint that cannot be continued."""


class DamagedCheckpoint(CheckpointError):
    """A file of a run that is missing, or not as it was written."""


class DiskFull(CheckpointError):
    """A file for which the disk has no room; the text says how many bytes it needs."""


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
    """How to install what `extra` brings.

    >>> installing("ray")
    "pip install -e '.[ray]' in the clone of fedloom"
    """
    return f"pip install -e '.[{extra}]' in the clone of fedloom"


def suggestion(name: str, known: Iterable[str]) -> str:
    """`": did you mean 'x'?"` for the nearest known name, or nothing when none is near."""
    near = difflib.get_close_matches(name[:LONGEST_QUOTED], list(known), n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else ""


def quoted(value: object, write: Callable[[Any], str] = repr) -> str:
    """A value as an error quotes it: on one line, and no more than its first 200 characters.

    >>> quoted("a\\n" * 150)[-40:]
    "a\\\\na\\\\na\\\\na\\\\na\\\\na\\\\na\\\\n'... (300 characters)"
    """
    if isinstance(value, str):
        start = repr(value[:LONGEST_QUOTED])
        return start if len(value) <= LONGEST_QUOTED else f"{start}... ({len(value):,} characters)"
    try:
        text = write(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in thousands of lists
        return f"a value of type {type(value).__name__} that is too long to show"
    return shortened(text)


def shortened(text: str) -> str:
    """The first 200 characters of a text, without control characters, and how long it is where there are more."""
    start = _printable(text[:LONGEST_QUOTED])
    return start if len(text) <= LONGEST_QUOTED else f"{start}... ({len(text):,} characters)"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, cut at 200 characters; its type where it has none."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if len(text) <= LONGEST_QUOTED else f"{text[:LONGEST_QUOTED]}..."


def error_text(error: BaseException) -> str:
    """What an error that fedloom did not raise is, and what it says, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def error_place(error: BaseException) -> str:
    """Where an error, or what caused it, arose in the user's own code: `my_methods.py:12 in train`, or nothing.

    That is the innermost line outside of fedloom, Python and what is installed.
    """
    for one in _causes(error):
        if marked := getattr(one, _PLACE, ""):
            return str(marked)
        if isinstance(one, SyntaxError) and one.filename and is_own_code(one.filename):
            return f"{shown_path(one.filename)}:{one.lineno}"
        own = [frame for frame in traceback.extract_tb(one.__traceback__) if is_own_code(frame.filename)]
        if own:
            inside = "" if own[-1].name.startswith("<") else f" in {own[-1].name}"
            return f"{shown_path(own[-1].filename)}:{own[-1].lineno}{inside}"
    return ""


def mark_place(error: BaseException) -> None:
    """Keep the place of an error that is about to go to another process, which its traceback does not."""
    if place := error_place(error):
        setattr(error, _PLACE, place)


def located(error: BaseException, text: str) -> str:
    """The text of an error, and where in the user's own code it arose."""
    place = error_place(error)
    return text if place in text else text + in_brackets(place)


def in_brackets(place: str) -> str:
    """A place as it follows a sentence, or nothing."""
    return place and f" (at {place})"


def is_own_code(file: str) -> bool:
    """Whether a file of code is the user's: not fedloom's, not Python's, and not installed."""
    return not file.startswith(_foreign()) and os.path.isfile(file)


def shown_path(file: str) -> str:
    """A file as the user would call it from here: relative where it lies below the current folder."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def code_place(thing: Any) -> str:
    """Where a class or function of the user's stands, `my_methods.py:9`; nothing for fedloom's own."""
    try:
        file, line = inspect.getsourcefile(thing) or "", inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):  # made at a prompt, or built in
        return ""
    return f"{shown_path(file)}:{line}" if is_own_code(file) else ""


_PLACE = "fedloom_place"
"""The attribute of an error that keeps its place."""


@cache
def _foreign() -> tuple[str, ...]:
    known = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    return (os.path.dirname(os.path.abspath(__file__)) + os.sep, *(path + os.sep for path in known))


def _causes(error: BaseException) -> Iterable[BaseException]:
    """The error, what it was raised from, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def one_line(text: str, longest: int = 500) -> str:
    """Foreign text as it may stand in a log: on one line, without control characters, and not endless."""
    return " ".join(_printable(text[: 4 * longest]).split())[:longest]


def _printable(text: str) -> str:
    """The text with a space in the place of each control character."""
    return "".join(c if c.isprintable() else " " for c in text)
