"""The code and the documents read as those of other libraries, by a counter."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from style_counter import Style, prose_of, style_of

ROOT = Path(__file__).resolve().parents[2]

TOKENS_PER_LINE = 9.2
LONG_LINES = 0
"""Lines with more than 100 columns: tables and templates of the report."""


@cache
def style_of_source() -> Style:
    """Return the figures of the package."""
    return style_of(sorted((ROOT / "src").rglob("*.py")))


def test_the_code_is_not_dense() -> None:
    style = style_of_source()
    assert style.tokens_per_line <= TOKENS_PER_LINE
    assert style.long_lines <= LONG_LINES


@pytest.mark.parametrize(
    ("kind", "most"), [("docstrings", 2.0), ("comments", 2.0), ("errors", 1.0)]
)
def test_sentences_of_the_code_have_few_unusual_phrases(kind: str, most: float) -> None:
    prose = getattr(style_of_source(), kind)
    assert prose.per_thousand <= most, "\n".join(prose.phrases)


def test_sentences_of_the_documents_have_few_unusual_phrases() -> None:
    prose = prose_of([*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))])
    assert prose.per_thousand <= 2.0, "\n".join(prose.phrases)


def test_unusual_phrases_and_dense_lines_are_found(tmp_path: Path) -> None:
    path = tmp_path / "dense.py"
    path.write_text(
        '"""Keep what is told, alone."""\nif not (a := [b for b in (1, 2) if b]):  # nobody\n'
        '    raise ValueError("a value whose kind is unknown")\n'
    )
    style = style_of([path])
    counts = [len(prose.phrases) for prose in (style.docstrings, style.comments, style.errors)]
    assert counts == [3, 1, 1]
    assert (style.code_lines, style.tokens) == (2, 25)
    page = tmp_path / "page.md"
    page.write_text("Kept `alone` here.\n")
    assert [phrase.rpartition(": ")[2] for phrase in prose_of([page]).phrases] == ["'Kept'"]
