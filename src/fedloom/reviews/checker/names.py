"""Finds names in the classes of a method that fedloom reads in another way than intended."""

import difflib
import inspect
from collections.abc import Iterator

from fedloom.algorithm import Algorithm
from fedloom.algorithm.method import Method
from fedloom.common.errors import (
    code_location,
)
from fedloom.parts.hooks import Part
from fedloom.reviews.checker.findings import Finding, kinds, source_match


def misread_names(method: Method) -> Iterator[Finding]:
    """Find names in the classes of a method that fedloom reads in another way than intended."""
    hooks = {name for base in (Algorithm, Part) for name in vars(base) if not name.startswith("_")}
    for kind in (kind for kind in kinds(method) if not kind.__module__.startswith("fedloom.")):
        bases = {
            name
            for base in kind.__mro__[1:]
            for name in [*vars(base), *vars(base).get("__annotations__", {})]
        }
        written = vars(kind).get("__annotations__", {})
        for name, value in vars(kind).items():
            if name.startswith("_") or name in bases or name in written:
                continue
            near = difflib.get_close_matches(name, hooks, 1, 0.8)
            if inspect.isfunction(value) and near and not source_match(method, rf"\.{name}\b")[0]:
                problem = f"{kind.__name__}.{name} is called by nobody"
                yield Finding(problem, code_location(value), f"did you mean {near[0]}?")
            elif isinstance(value, bool | int | float | str) and name.islower():
                location = source_match(method, rf"^\s+{name}\s*=")[0] or code_location(kind)
                problem = (
                    f"{name} = {value!r} has no type, so it is no parameter of {kind.__name__}"
                )
                remedy = (
                    f"write {name}: {type(value).__name__} = {value!r}, or ClassVar where "
                    "it is none"
                )
                yield Finding(problem, location, remedy)
