"""The findings of `fedloom check`, with their lines in a method's code."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from fedloom.algorithm import Algorithm
from fedloom.algorithm.method import Method, components
from fedloom.common.errors import is_user_code, shown_path
from fedloom.parts.hooks import Part


@dataclass(frozen=True)
class Finding:
    """A mistake in a method.

    Attributes:
        problem: The mistake.
        location: The line of its code, such as `my_methods.py:12`; empty where it is not known.
        remedy: How to mend it; may be empty.
    """

    problem: str
    location: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.location, self.problem, self.remedy)))


class Findings(list[Finding]):
    """The findings about a method, as a list that a prompt shows line by line."""

    def __repr__(self) -> str:
        if not self:
            return "Nothing to fix: all ways to run the method gave the same models."
        return "\n".join(map(str, self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def kinds(method: Method) -> list[type]:
    """Return the classes of a method and of its inner methods, except the classes of the
    interface.
    """
    classes = [kind for inner in components(method) for kind in type(inner).__mro__]
    return [
        kind
        for kind in dict.fromkeys(classes)
        if issubclass(kind, Method) and kind not in (Method, Algorithm, Part)
    ]


def source_match(method: Method, pattern: str) -> tuple[str, str]:
    """Return the first line in the classes of a method that matches the pattern.

    Args:
        method: The method.
        pattern: Regular expression, searched in code without comments.

    Returns:
        Location as `file:line` and the matching text; "" and "" if no line matches.
    """
    for definition in _definitions(method):
        try:
            lines, start = inspect.getsourcelines(definition)
            file = inspect.getsourcefile(definition) or ""
        except (OSError, TypeError):
            continue
        for number, line in enumerate(lines):
            if match := re.search(pattern, line.partition("#")[0]):
                return f"{shown_path(file)}:{start + number}", match[0]
    return "", ""


def _definitions(method: Method) -> Iterator[Any]:
    """Yield the classes of a method. Python does not find the source of a class in a notebook:
    yield its functions instead.
    """
    for kind in kinds(method):
        in_file = hasattr(sys.modules.get(kind.__module__), "__file__")
        yield from [kind] if in_file else filter(inspect.isfunction, vars(kind).values())


def calling_location() -> str:
    """Return the innermost line under way that is a method's or the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_methods(frame):
        frame = frame.f_back
    return "" if frame is None else _shown(frame)


def drawing_location() -> str:
    """Return the line under way if a method calls PyTorch there, and no layer of a model; else
    "".
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
        frame = frame.f_back
    if frame is None or not _is_methods(frame) or isinstance(frame.f_locals.get("self"), nn.Module):
        return ""
    return _shown(frame)


def _is_methods(frame: FrameType) -> bool:
    inside: str = frame.f_globals.get("__name__", "")
    return inside.startswith(("fedloom.algorithms.", "fedloom.parts.")) or is_user_code(
        frame.f_code.co_filename
    )


def _shown(frame: FrameType) -> str:
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
