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
from collections.abc import Callable, Iterable
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
        super().__init__(f"unknown {kind} {quoted(name)}:{suggestion(name, names)} (there are: {', '.join(names)})")

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
    """`" did you mean 'x'?"` for the nearest known name, or nothing when none is near."""
    near = difflib.get_close_matches(name[:LONGEST_QUOTED], list(known), n=1, cutoff=0.5)
    return f" did you mean {near[0]!r}?" if near else ""


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


def one_line(text: str, longest: int = 500) -> str:
    """Foreign text as it may stand in a log: on one line, without control characters, and not endless."""
    return " ".join(_printable(text[: 4 * longest]).split())[:longest]


def _printable(text: str) -> str:
    """The text with a space in the place of each control character."""
    return "".join(c if c.isprintable() else " " for c in text)
