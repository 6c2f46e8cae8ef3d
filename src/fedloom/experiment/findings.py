"""What `fedloom check` finds, and where in a method's code that is."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from types import FrameType

from torch import nn

from fedloom.algorithm import Algorithm, Wrapper
from fedloom.errors import is_own_code, shown_path


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a method, or will be: what, where in its code (`my_methods.py:12`), and how to mend it."""

    what: str
    place: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.place and self.place + ': '}{self.what}{self.remedy and ': ' + self.remedy}"


def kinds(method: Algorithm) -> list[type]:
    """The classes of a method and of those in it, without those of the interface."""
    found = [kind for one in method.nested() for kind in type(one).__mro__]
    return [kind for kind in dict.fromkeys(found) if issubclass(kind, Algorithm) and kind not in (Algorithm, Wrapper)]


def source_place(method: Algorithm, pattern: str) -> str:
    """The first line in the classes of a method that the pattern finds; nothing where none does."""
    for kind in kinds(method):
        try:
            lines, first = inspect.getsourcelines(kind)
            file = inspect.getsourcefile(kind) or ""
        except (OSError, TypeError):
            continue
        for number, line in enumerate(lines):
            if re.search(pattern, line.partition("#")[0]):
                return f"{shown_path(file)}:{first + number}"
    return ""


def calling_place() -> str:
    """The innermost line under way that is a method's or the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_methods(frame):
        frame = frame.f_back
    return "" if frame is None else _shown(frame)


def drawing_place() -> str:
    """The line under way where it is a method that calls PyTorch, and no layer of a model; else nothing."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
        frame = frame.f_back
    if frame is None or not _is_methods(frame) or isinstance(frame.f_locals.get("self"), nn.Module):
        return ""
    return _shown(frame)


def _is_methods(frame: FrameType) -> bool:
    inside: str = frame.f_globals.get("__name__", "")
    return inside.startswith("fedloom.algorithms.") or is_own_code(frame.f_code.co_filename)


def _shown(frame: FrameType) -> str:
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
