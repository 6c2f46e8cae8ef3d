"""Counts how the code and the documents read: tokens per line, long lines, and unusual phrases.

    python tests/support/style_counter.py [FOLDER]    # prints the figures, and the place of each phrase

Code tokens are the tokens of Python without comments, docstrings and line ends. The phrases are
grammatical, but readers do not meet them in the documentation of other libraries.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PHRASES = re.compile(
    r"(?<![.?!] )\bwhat (?:is|are|was|were|it|they|a|an|the|has|have|had|each|clients?|there|else|comes?|came)\b"
    r"|\b(?:whose|whoever|whom|whosoever)\b"
    r"|\b(?:told|tells?|said|says|hears?|heard|asked|asks)\b"
    r"|\bkept\b|\bkeeps? what\b"
    r"|\b(?:so|as) (?:many|much)\b"
    r"|\b(?:alone|by itself|by themselves|apart)\b"
    r"|\b(?:nobody|nothing else|anybody|everybody)\b"
    r"|\bof (?:its|their|your|one's|my) own\b"
    r"|\b(?:that|those) of\b"
    r"|\bthere (?:is|are) (?:to|no|one|none)\b"
    r"|\b(?:comes? (?:of|back)|stands? (?:in|at|beside)|lies?|goes? (?:on|with|in))\b"
    r"|\bas (?:it|they) (?:is|are|was|were|does|do)\b"
    r"|, (?:which|who) (?:is|are|was|were|has|have|then|alone|also)\b",
    re.IGNORECASE,
)

COLUMNS = 100
"""Columns of a line, at most."""

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
"""Tokens that are not code."""


@dataclass
class Prose:
    """Words of one kind of text, and the unusual phrases in it."""

    words: int = 0
    phrases: list[str] = field(default_factory=list)

    def read(self, text: str, place: str) -> None:
        """Count the words of a text."""
        self.words += len(re.findall(r"[A-Za-z']+", text))
        self.phrases += [f"{place}: {match.group(0)!r}" for match in PHRASES.finditer(text)]

    @property
    def per_thousand(self) -> float:
        """Unusual phrases per 1,000 words."""
        return 1000 * len(self.phrases) / max(1, self.words)


@dataclass
class Style:
    """Figures of a code base."""

    lines: int = 0
    long_lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    docstrings: Prose = field(default_factory=Prose)
    comments: Prose = field(default_factory=Prose)
    errors: Prose = field(default_factory=Prose)

    @property
    def tokens_per_line(self) -> float:
        """Code tokens per line that has any."""
        return self.tokens / max(1, self.code_lines)


def documented(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of modules, classes and functions."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.body and isinstance(node.body[0], ast.Expr):
            value = node.body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def style_of(paths: Iterable[Path]) -> Style:
    """Return the figures of Python files."""
    style = Style()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        style.lines += text.count("\n")
        style.long_lines += sum(len(line) > COLUMNS for line in text.splitlines())
        docstrings = {(node.lineno, node.col_offset): str(node.value) for node in documented(tree)}
        for (line, _), docstring in docstrings.items():
            style.docstrings.read(docstring, f"{path}:{line}")
        for raised in (node for node in ast.walk(tree) if isinstance(node, ast.Raise)):
            for part in ast.walk(raised):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    style.errors.read(part.value, f"{path}:{part.lineno}")
        code_lines = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                style.comments.read(token.string, f"{path}:{token.start[0]}")
            if token.type not in LAYOUT and token.start not in docstrings:
                style.tokens += 1
                code_lines.add(token.start[0])
        style.code_lines += len(code_lines)
    return style


def prose_of(paths: Iterable[Path]) -> Prose:
    """Return the phrases of Markdown files, without code."""
    prose = Prose()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        prose.read(re.sub(r"```.*?```|`[^`]*`", " ", text, flags=re.DOTALL), str(path))
    return prose


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "src")
    style = style_of(sorted(folder.rglob("*.py")))
    print(f"{style.tokens:,} code tokens, {style.tokens_per_line:.2f} per line of code")
    print(f"{style.long_lines} of {style.lines:,} lines have more than {COLUMNS} columns")
    for kind in ("docstrings", "comments", "errors"):
        prose: Prose = getattr(style, kind)
        print(
            f"{kind}: {prose.per_thousand:.1f} unusual phrases per 1,000 words",
            *prose.phrases,
            sep="\n  ",
        )


if __name__ == "__main__":
    main()
