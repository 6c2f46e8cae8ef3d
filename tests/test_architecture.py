"""The rooms of the package: what may import what, and names that mean one thing. `docs/architecture.md` states the order."""

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

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "architecture.md"

TOP = {"__init__", "__main__", "errors", "randomness", "round", "training", "task", "algorithm"}
TEMPLATES = "fedloom.sites.app"  # files of a user's app, copied as they are

# Functions whose parameters are what a user sets.
MOST_PARAMETERS = 8
LONGER = {
    "fedloom.cli.reproducing.reproduce",
    "fedloom.data.sets.femnist.femnist",
    "fedloom.data.sets.synthetic.synthetic_feddc",
    "fedloom.data.sets.table.table",
    "fedloom.experiment.run.run",
    "fedloom.local.cohort.fit",
    "fedloom.task.make_task",
}


@dataclass(frozen=True)
class Import:
    """One imported module, with the line where it is named."""

    module: str
    line: int


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    for path in sorted((SOURCE / "fedloom").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if not name.startswith(f"{TEMPLATES}.")}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Return a module's imports: at the top, in functions, and for type checkers alone."""
    found = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.append(Import(full if full in modules() else node.module, node.lineno))
    return tuple(found)


@cache
def floors() -> dict[str, int]:
    """The floor of each room, as the page states it, counted from the ground."""
    (block,) = re.findall(r"^```text\n# the floors.*?\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    levels = [re.split(r"\s{2,}", line)[0].split(", ") for line in block.splitlines()]
    return {room: floor for floor, rooms in enumerate(reversed(levels)) for room in rooms}


def room(module: str) -> str | None:
    """The room that a module lies in; None for the package itself and its command."""
    inside = module.removeprefix("fedloom").removeprefix(".").replace(".", "/")
    within = [name for name in floors() if inside == name or inside.startswith(f"{name}/")]
    return max(within, key=len, default=None)


def crossings() -> Iterator[tuple[str, str, str]]:
    """Every import from one room into another: the two rooms, and where it stands."""
    for module in modules():
        for each in imports(module):
            here, there = room(module), room(each.module)
            if each.module in modules() and here is not None and there is not None and here != there:
                yield here, there, f"{module}:{each.line} imports {each.module}"


def repeated(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in names.items() if len(places) > 1}


def test_every_module_has_a_room_on_the_page() -> None:
    assert {path.stem for path in (SOURCE / "fedloom").glob("*.py")} == TOP
    assert [name for name in modules() if room(name) is None and name not in ("fedloom", "fedloom.__main__")] == []
    assert [name for name in floors() if f"fedloom.{name.replace('/', '.')}" not in modules()] == []


def test_the_drawing_shows_every_room() -> None:
    drawn = re.findall(r'<text class="room"[^>]*>([\w/]+)</text>', (ROOT / "docs/assets/rooms.svg").read_text())
    assert sorted(drawn) == sorted(floors())


def test_rooms_import_only_from_floors_below() -> None:
    upward = list(crossings())
    assert len(upward) > 500
    upwards = [where for here, there, where in upward if floors()[there] >= floors()[here]]
    assert upwards == []


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name: {each.module for each in imports(name) if each.module in modules()} for name in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_engines_import_no_method() -> None:
    found = {
        f"{name}:{each.line} imports {each.module}"
        for name in modules()
        if room(name) == "engines" or name == "fedloom.sites.flower_engine"
        for each in imports(name)
        if each.module.startswith("fedloom.algorithms")
    }
    assert found == set()


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("ray", ("fedloom.engines.ray",)),
        ("flwr", ("fedloom.sites",)),
        ("typer", ("fedloom.cli",)),
    ],
)
def test_a_library_is_imported_in_its_room_alone(library: str, places: tuple[str, ...]) -> None:
    found = [
        f"{name}:{each.line}"
        for name in modules()
        for each in imports(name)
        if each.module.split(".")[0] == library and not f"{name}.".startswith(tuple(f"{place}." for place in places))
    ]
    assert found == []


def test_no_class_name_means_two_things() -> None:
    named = defaultdict(list)
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                named[node.name].append(module)
    assert repeated(named) == {}


def test_no_module_name_means_two_things() -> None:
    named = defaultdict(list)
    for module in modules():
        named[module.rpartition(".")[2]].append(module)
    assert repeated(named) == {}


def test_functions_take_few_parameters() -> None:
    found = set()
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                taken = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len(taken) - (taken[:1] in (["self"], ["cls"])) > MOST_PARAMETERS:
                    found.add(f"{module}.{node.name}")
    assert found == LONGER


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bspec(?:ification)? \d|\bthe specification\b|\bspec\.md\b|\.\./(?:spec|shared)\b",  # documents that are not here
        r"pip install \S?fedloom\b",  # a package index knows no fedloom, or a stranger's
    ],
)
def test_no_text_sends_its_reader_where_there_is_nothing(pattern: str) -> None:
    files = [path for path in (SOURCE / "fedloom").rglob("*") if path.suffix in {".py", ".md", ".toml", ".html"}]
    texts = [
        *files,
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "examples").glob("*.toml"),
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line, re.I)
    ]
    assert found == []
