"""Counts the lines of code of each method in its source."""

from __future__ import annotations

import ast
import inspect
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedloom.algorithm.method import Method, algorithms
from fedloom.common.registry import RegistryEntry
from fedloom.parts.families import FAMILIES, family_of

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def code_lines(source: str, name: str) -> int:
    """Return the number of lines of code of the class `name` and of the code that it uses.

    Functions, constants, bases and classes of the same file count, also if they are used
    indirectly. Other registered methods, docstrings, comments, blank lines and imports do not.
    """
    tree = ast.parse(source)
    definitions = {defined: node for node in tree.body for defined in _names(node)}
    needed, open_names = {}, [name]
    while open_names:
        current = open_names.pop()
        node = definitions.get(current)
        if node is None or current in needed or (current != name and _registered(node)):
            continue
        needed[current] = node
        open_names += [used.id for used in ast.walk(node) if isinstance(used, ast.Name)]
    text, numbers = (
        source.splitlines(),
        {number for node in needed.values() for number in _span(node)},
    )
    numbers -= {
        number
        for node in needed.values()
        for inner in ast.walk(node)
        for number in _docstring(inner)
    }
    return sum(
        bool(text[number - 1].strip()) and not text[number - 1].lstrip().startswith("#")
        for number in numbers
    )


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [
        inner.id
        for target in targets
        if target
        for inner in ast.walk(target)
        if isinstance(inner, ast.Name)
    ]


def _registered(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        "register" in ast.dump(decorator) for decorator in node.decorator_list
    )


def _span(node: ast.stmt) -> range:
    begin = min(
        [node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]
    )
    return range(begin, (node.end_lineno or begin) + 1)


def _docstring(node: ast.AST) -> range:
    body = getattr(node, "body", None)
    statement = (
        body[0]
        if isinstance(body, list) and body and isinstance(node, ast.FunctionDef | ast.ClassDef)
        else None
    )
    is_text = (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
    return _span(statement) if is_text and statement is not None else range(0)


def length(entry: RegistryEntry[type[Method]]) -> int:
    """Return the lines of code of a registered method."""
    return code_lines(
        Path(inspect.getfile(entry.make)).read_text(encoding="utf-8"), entry.make.__name__
    )


def lengths() -> Iterator[tuple[str, RegistryEntry[Any], int]]:
    """Yield each method's family, its entry and its lines, family by family, the shortest first."""
    for family in FAMILIES:
        counted = [(length(entry), entry) for entry in algorithms if family_of(entry) == family]
        for lines, entry in sorted(counted, key=lambda pair: (pair[0], pair[1].name)):
            yield family, entry, lines


def median() -> int:
    """Return the median of all methods' lines."""
    return round(statistics.median(lines for _, _, lines in lengths()))
