"""Check the layers of modules, their imports, unique names and numbers of parameters.

`docs/architecture.md` states the order of the layers.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "architecture.md"

TOP = {"__init__", "__main__"}
TEMPLATES = "fedloom.sites.app"  # files of a user's app, copied unchanged

# The user sets the parameters of these functions.
MOST_PARAMETERS = 8

LONGER = {
    "fedloom.cli.predicting.evaluate",
    "fedloom.cli.reproducing.reproduce",
    "fedloom.data.sets.femnist.femnist",
    "fedloom.data.sets.synthetic.synthetic_feddc",
    "fedloom.data.sets.table.table",
    "fedloom.runs.run.run",
    "fedloom.study.tune.tune",
    "fedloom.local.cohort.fit",
    "fedloom.task.making.make_task",
}

MOST_IMPORTS = 15
"""Modules of the package that one module imports, at most."""

MOST_ARROWS = 152
"""Pairs of rooms with an import between them, at most. Only lower it."""


@dataclass(frozen=True)
class Import:
    """An imported module and the line of the import."""

    module: str
    line: int


@cache
def modules() -> dict[str, Path]:
    """Return the path of every module of the package by its dotted name."""
    paths = {}
    for path in sorted((SOURCE / "fedloom").rglob("*.py")):
        names = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return {name: path for name, path in paths.items() if not name.startswith(f"{TEMPLATES}.")}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Return a module's imports, also those in functions and for type checkers."""
    names = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.append(Import(full if full in modules() else node.module, node.lineno))
    return tuple(names)


@cache
def floors() -> dict[str, int]:
    """Return the floor of each room from the documentation page, counted from the ground."""
    (block,) = re.findall(
        r"^```text\n# the floors.*?\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S
    )
    levels = [re.split(r"\s{2,}", line)[0].split(", ") for line in block.splitlines()]
    return {room: floor for floor, rooms in enumerate(reversed(levels)) for room in rooms}


def room(module: str) -> str | None:
    """Return a module's room; None for the package itself and its command."""
    inside = module.removeprefix("fedloom").removeprefix(".").replace(".", "/")
    within = [name for name in floors() if inside == name or inside.startswith(f"{name}/")]
    return max(within, key=len, default=None)


def crossings() -> Iterator[tuple[str, str, str]]:
    """Yield every import between two rooms, as both rooms and its line."""
    for module in modules():
        for target in imports(module):
            source, destination = room(module), room(target.module)
            if (
                target.module in modules()
                and source is not None
                and destination is not None
                and source != destination
            ):
                yield source, destination, f"{module}:{target.line} imports {target.module}"


def repeated(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: holders for name, holders in names.items() if len(holders) > 1}


def test_every_module_has_a_room_on_the_page() -> None:
    assert {path.stem for path in (SOURCE / "fedloom").glob("*.py")} == TOP
    assert [
        name
        for name in modules()
        if room(name) is None and name not in ("fedloom", "fedloom.__main__")
    ] == []
    assert [name for name in floors() if f"fedloom.{name.replace('/', '.')}" not in modules()] == []


def test_the_drawing_shows_every_room() -> None:
    drawn = re.findall(
        r'<text class="room"[^>]*>([\w/]+)</text>', (ROOT / "docs/assets/rooms.svg").read_text()
    )
    assert sorted(drawn) == sorted(floors())


def test_rooms_import_only_from_floors_below() -> None:
    every_crossing = list(crossings())
    assert len(every_crossing) > 500
    upward = [line for room, target, line in every_crossing if floors()[target] >= floors()[room]]
    assert upward == []


def test_few_rooms_import_each_other() -> None:
    assert len({(room, target) for room, target, _ in crossings()}) <= MOST_ARROWS


def test_modules_import_few_modules() -> None:
    crowded = [
        name
        for name in modules()
        if len({imported.module for imported in imports(name)} & modules().keys()) > MOST_IMPORTS
    ]
    assert crowded == []


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {
        name: {imported.module for imported in imports(name) if imported.module in modules()}
        for name in modules()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_engines_import_no_method() -> None:
    offences = {
        f"{name}:{imported.line} imports {imported.module}"
        for name in modules()
        if room(name) == "engines" or name == "fedloom.sites.flower_engine"
        for imported in imports(name)
        if imported.module.startswith("fedloom.algorithms")
    }
    assert offences == set()


def test_parts_import_no_other_part() -> None:
    """No module with a registered part imports another one; bases and helpers register no part."""
    registered = {
        module
        for module in modules()
        if room(module) == "parts" and any(map(is_registration, ast.walk(tree(module))))
    }
    assert len(registered) > 15
    offences = {
        f"{module}:{imported.line} imports {imported.module}"
        for module in registered
        for imported in imports(module)
        if imported.module in registered
    }
    assert offences == set()


def is_registration(node: ast.AST) -> bool:
    """Return True for `@algorithms.register(...)` above a class."""
    return isinstance(node, ast.ClassDef) and any(
        "register" in ast.unparse(line) for line in node.decorator_list
    )


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("ray", ("fedloom.engines.ray",)),
        ("flwr", ("fedloom.sites",)),
        ("typer", ("fedloom.cli",)),
    ],
)
def test_a_library_is_imported_in_its_room_alone(library: str, rooms: tuple[str, ...]) -> None:
    offences = [
        f"{name}:{imported.line}"
        for name in modules()
        for imported in imports(name)
        if imported.module.split(".")[0] == library
        and not f"{name}.".startswith(tuple(f"{room}." for room in rooms))
    ]
    assert offences == []


def test_class_names_are_unique() -> None:
    named = defaultdict(list)
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                named[node.name].append(module)
    assert repeated(named) == {}


def test_module_names_are_unique() -> None:
    named = defaultdict(list)
    for module in modules():
        named[module.rpartition(".")[2]].append(module)
    assert repeated(named) == {}


def test_functions_take_few_parameters() -> None:
    long_functions = set()
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                taken = [
                    argument.arg
                    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                ]
                if len(taken) - (taken[:1] in (["self"], ["cls"])) > MOST_PARAMETERS:
                    long_functions.add(f"{module}.{node.name}")
    assert long_functions == LONGER


@pytest.mark.parametrize(
    "pattern",
    [
        # documents outside the repository
        r"\bspec(?:ification)? \d|\bthe specification\b|\bspec\.md\b|\.\./(?:spec|shared)\b",
        r"pip install \S?fedloom\b",  # no package index has fedloom, or only an unrelated one
    ],
)
def test_no_text_points_to_documents_or_packages_that_do_not_exist(pattern: str) -> None:
    files = [
        path
        for path in (SOURCE / "fedloom").rglob("*")
        if path.suffix in {".py", ".md", ".toml", ".html"}
    ]
    texts = [
        *files,
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "examples").glob("*.toml"),
    ]
    matches = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line, re.I)
    ]
    assert matches == []
