"""Generates parts of the documentation from the code: a hook of MkDocs.

Lines of a page are replaced as follows, so that a new method needs no edit of a page:

- `[[methods: personal]]`: all methods of a family; `[[methods]]`: a table of all methods
- `[[datasets]]`, `[[partitions]]`, `[[label_noises]]`, `[[shifts]]`, `[[models]]`,
  `[[objectives]]`, `[[recorders]]`, `[[trackers]]`: all entries of a registry
- `[[moments]]`: the moments of a round; `[[lengths]]`: the lines of code of each method
- `[[ledger]]`: the state of the papers' tables and figures
- `[[file: benchmarks/RESULTS.md]]`: a file of the repository, with its links turned into page links

Within a line, `[[= a^2 + b]]` is set as a formula.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from fedloom.algorithm.method import Method, algorithms
from fedloom.cli.catalog import signature
from fedloom.common.expression import show
from fedloom.common.fields import LARGEST_COUNT
from fedloom.common.registry import Registry, RegistryEntry
from fedloom.data.dataset import datasets
from fedloom.data.noise import label_noises
from fedloom.data.partition import partitions
from fedloom.data.shift import shifts
from fedloom.models import models
from fedloom.objectives import objectives
from fedloom.parts.families import FAMILIES, family_of
from fedloom.parts.moments import MOMENTS, parts_by_hook
from fedloom.recording.recorder import recorders
from fedloom.runs.trackers.tracker import trackers

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from formulas import GREEK, with_formulas
from lengths import lengths, median

from ledger import ledger, to_markdown

ROOT = Path(__file__).resolve().parents[2]

PAPERS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("papers.toml").read_text("utf-8")
)
"""Titles of papers by method, so that the search of the site finds a method by its paper."""

REGISTRIES: dict[str, Registry[Any]] = {
    "datasets": datasets, "partitions": partitions, "label_noises": label_noises, "shifts": shifts,
    "models": models, "recorders": recorders,
    "trackers": trackers, "objectives": objectives,
}  # fmt: skip

_ELSEWHERE = '<script src="https://unpkg.com/iframe-worker/shim"></script>'

_SIGNS = {
    "&lt;-": "←",
    "-&gt;": "→",
    "&gt;=": "≥",
    "&lt;=": "≤",
    "||": "‖",
    " * ": " · ",
    "...": "…",
    "!=": "≠",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the markers of a page. MkDocs calls this for each page."""
    markdown = re.sub(
        r"\[\[= (.+?)\]\]", lambda formula: with_formulas(formula[1], _prose), markdown
    )
    return re.sub(
        r"^\[\[(\w+)(?:: ([\w./-]+))?\]\]$",
        lambda match: _filled(match[1], match[2]),
        markdown,
        flags=re.M,
    )


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Replace the remote script for searching from disk by a local copy."""
    return output.replace(
        _ELSEWHERE, f'<script src="{"../" * page.url.count("/")}assets/worker.js"></script>'
    )


def on_post_template(output_content: str, **_: Any) -> str:
    """Remove the remote script from the page for missing pages."""
    return output_content.replace(_ELSEWHERE, "")


def _filled(kind: str, which: str | None) -> str:
    if kind == "methods":
        return overview() if which is None else "\n\n".join(map(described, family(which)))
    if kind == "lengths":
        return table_of_lengths()
    if kind == "moments":
        return table_of_moments()
    if kind == "ledger":
        return to_markdown(ledger(ROOT / "benchmarks" / "records" / "papers"))
    if kind == "file" and which is not None:
        text = (ROOT / which).read_text(encoding="utf-8")
        body = text.partition("\n")[2].strip()  # the page has its own title
        return re.sub(
            r"\[([^]]*)\]\(([^)#:]+)(#[^)]*)?\)",
            lambda link: _page_link(link, (ROOT / which).parent),
            body,
        )
    # one level below the page's sections
    return "\n\n".join(f"#{described(entry)}" for entry in REGISTRIES[kind])


def _page_link(link: re.Match[str], folder: Path) -> str:
    """Turn a link of a file in `folder` into a page link, or into text if no page has the target."""
    text, target, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
    if target.is_relative_to(ROOT / "docs"):
        return f"[{text}]({target.relative_to(ROOT / 'docs')}{anchor})"
    page = ROOT / "docs" / f"{target.stem.lower()}.md"
    return (
        f"[{text}]({page.name}{anchor})"
        if target.parent == ROOT / "benchmarks" and page.exists()
        else text
    )


def family(name: str) -> list[RegistryEntry[type[Method]]]:
    """Return the methods of a family, by name."""
    if name not in FAMILIES:
        raise KeyError(f"there is no family of methods called {name!r}")
    return [entry for entry in algorithms if family_of(entry) == name]


def overview() -> str:
    """Return tables of all methods by family, with the cases for their use."""
    sections = []
    for name, title in FAMILIES.items():
        lines = [
            f"## [{title}]({name}.md)",
            "",
            "| method | what it is | when to use it |",
            "| --- | --- | --- |",
        ]
        for entry in family(name):
            cells = [
                f"[`{entry.name}`]({name}.md#{entry.name})",
                typeset(entry.summary, entry.parameters),
                typeset(Doc(entry).when),
            ]
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def table_of_lengths() -> str:
    """Return a table of the lines of code and the source of each method."""
    lines = [
        f"Half of the methods take at most {median()} lines.",
        "",
        "| method | lines of code | source |",
        "| --- | --- | --- |",
    ]
    for name, entry, count in lengths():
        source = typeset(Doc(entry).source).replace("|", "&#124;") or "fedloom"
        lines.append(f"| [`{entry.name}`](methods/{name}.md#{entry.name}) | {count} | {source} |")
    return "\n".join(lines)


def table_of_moments() -> str:
    """Return a table of the moments of a round, with hooks and the parts that can act in them."""
    by_hook = parts_by_hook()
    lines = ["| moment | hooks | runs at | parts |", "| --- | --- | --- | --- |"]
    for moment in MOMENTS:
        names = sorted({name for hook in moment.hooks for name in by_hook[hook]})
        hooks, parts = (
            ", ".join(f"`{name}`" for name in listed) for listed in (moment.hooks, names)
        )
        lines.append(f"| {moment.name} | {hooks} | {moment.runs} | {parts or 'none of fedloom'} |")
    return "\n".join(lines)


class Doc:
    """The parts of an entry's docstring."""

    def __init__(self, entry: RegistryEntry[Any]) -> None:
        text, _, when = entry.text.partition("\nUse it ")
        self.when = f"Use it {' '.join(when.split())}" if when else ""
        source = re.search(r"\s*\bSource: (.+?)(?:\n\n|\Z)", text, flags=re.S)
        self.source = "" if source is None else " ".join(source[1].split())
        body = text if source is None else text[: source.start()] + "\n\n" + text[source.end() :]
        self.summary, *self.paragraphs = [
            " ".join(lines.split()) for lines in re.split(r"\n{2,}", body) if lines.strip()
        ]


def described(entry: RegistryEntry[Any]) -> str:
    """Return the section of a page about one entry."""
    doc = Doc(entry)
    lines = [f"## {entry.name} {{#{entry.name}}}", f"**{typeset(doc.summary, entry.parameters)}**"]
    lines.append(f"```text\n{_wrapped(entry.name, signature(entry))}\n```")
    lines += [typeset(paragraph, entry.parameters) for paragraph in doc.paragraphs]
    if doc.when:
        lines.append(f'!!! tip "When to use it"\n    {typeset(doc.when)}')
    if entry.parameters and not getattr(entry.make, "variadic", False):
        lines.append(_parameters(entry))
    if doc.source:
        is_method = inspect.isclass(entry.make) and issubclass(entry.make, Method)
        papers = PAPERS.get(entry.name, ()) if is_method else ()
        titles = " ".join(f"“{escape(title, quote=False)}”" for title in papers)
        lines.append(f"*Source: {typeset(doc.source)}* {titles}".rstrip())
    return "\n\n".join(lines)


def _wrapped(name: str, parameters: Iterable[str]) -> str:
    """Return a signature, with one parameter per line if it is longer than 80 characters."""
    parameters = list(parameters)
    line = f"{name}({', '.join(parameters)})"
    if len(line) <= 80:
        return line
    return f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + ")"


def _parameters(entry: RegistryEntry[Any]) -> str:
    hints = get_type_hints(entry.make, include_extras=True)
    lines = ["| parameter | default | takes | meaning |", "| --- | --- | --- | --- |"]
    for name, parameter in entry.parameters.items():
        default = parameter.default
        if default is inspect.Parameter.empty:
            text = "required"
        elif repr(default) == "<factory>":
            text = "its own"
        elif isinstance(default, Method):
            text = f"`{type(default).__name__.lower()}`"
        else:
            text = f"`{default if isinstance(default, str) and default.isidentifier() else show(default)}`"
        sentences = re.split(r"(?<=[.;])\s+", entry.text)
        sentence = next(
            (" ".join(text.split()) for text in sentences if re.search(f"`{name}[`=]", text)), ""
        )
        meaning = typeset(entry.arguments[name] or sentence, entry.parameters)
        cells = (f"`{name}`", text, kind(hints.get(name, Any)), meaning)
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines)


def kind(hint: Any) -> str:
    """Return a type and its range in words."""
    plain = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "none",
    }
    if hint in plain:
        return plain[hint]
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        bounds = [bound for field in metadata for bound in getattr(field, "metadata", ())]
        return " ".join([kind(inner), " and ".join(filter(None, map(_bound, bounds)))]).strip()
    if get_origin(hint) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(hint))
    if inspect.isclass(hint) and issubclass(hint, Method):
        return "a method"
    if get_origin(hint) in (list, tuple):
        return "a list"
    arms = [kind(arm) for arm in get_args(hint)]
    return " or ".join(dict.fromkeys(arms)) if arms and get_origin(hint) is not dict else "a value"


def _bound(bound: Any) -> str:
    signs = {"ge": "≥", "gt": "&gt;", "le": "≤", "lt": "&lt;"}
    limits = [(sign, getattr(bound, name)) for name, sign in signs.items() if hasattr(bound, name)]
    return " ".join(f"{sign} {limit:g}" for sign, limit in limits if abs(limit) < LARGEST_COUNT)


def typeset(text: str, names: Iterable[str] = ()) -> str:
    """Return prose as Markdown with its plain formulas in MathML.

    Text in backticks and `names` with an underscore stay unchanged.

    >>> typeset("`mu`: eta is w_t")
    '`mu`: η is <math><msub><mi>w</mi><mi>t</mi></msub></math>'
    """
    for name in filter(lambda name: "_" in name, names):
        text = re.sub(rf"(?<![\w`]){name}(?![\w`=])", f"`{name}`", text)
    return with_formulas(text, _prose)


def _prose(text: str) -> str:
    """Return text between formulas, its single signs and Greek letters as such."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else _signs(piece) for piece in pieces)


def _signs(text: str) -> str:
    text = escape(text, quote=False)
    for plain, sign in _SIGNS.items():
        text = text.replace(plain, sign)
    text = re.sub(
        rf"(?<![A-Za-z_])({'|'.join(GREEK)})(?![a-z])", lambda match: GREEK[match[1]], text
    )
    return re.sub(r"([*_\[\]\\])", r"\\\1", text)
