"""The templates of pages (HTML, escaped) and of files (Markdown, LaTeX)."""

import re
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from fedloom.common.errors import printable, shortened
from fedloom.report.cells import best_cells

NO_BREAK = "\u00a0"

_ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "–": "--",
    "†": r"\dag{}",
    "ⁿ": r"\textsuperscript{n}",
    "ᵗ": r"\textsuperscript{t}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}
"""Characters that LaTeX would interpret, and signs that older LaTeX does not know."""


@cache
def templates() -> Environment:
    """Return the templates; those of pages escape their values."""
    environment = Environment(
        loader=PackageLoader("fedloom.report"),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.globals["best_cells"] = best_cells
    environment.globals["asset"] = lambda name: Markup(
        (files("fedloom.report") / "assets" / name).read_text("utf-8")
    )
    # without sorting the keys
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "breakable": _breakable,
        "code": _code,
        "flat": _flat,
        "latex": escape_latex,
        "lines": _lines,
        "markdown": escape_markdown,
        "nobreak": lambda text: text.replace(" ", NO_BREAK),
        "plain": _plain,
        "printable": printable,
        "signs": with_signs,
    }
    return environment


def with_signs(text: str) -> str:
    """Return text with `80 %` and `≤ 0.2` on one line each."""
    return re.sub(r"([≤≥]) ", rf"\1{NO_BREAK}", text.replace(" %", f"{NO_BREAK}%"))


def _breakable(text: str) -> Markup:
    """Return a key or a name that may be broken after its dots, underscores, brackets and equals
    signs, but in no number.
    """
    return Markup(re.sub(r"([_(=]|\.(?!\d))", r"\1<wbr>", str(escape(text))))


def _code(text: str) -> str:
    """Return a name as code in Markdown; it may come from a file."""
    return f"`{_plain(text)}`"


def _plain(value: object) -> str:
    return shortened(str(value)).replace("`", "'")


def _lines(text: str) -> Markup:
    """Return a title with its line breaks, in which signs stay with their numbers."""
    return Markup("<br>").join(with_signs(text).splitlines())


def escape_latex(text: str) -> str:
    """Return text without characters that LaTeX interprets."""
    return "".join(_ESCAPED.get(letter, letter) for letter in text)


def escape_markdown(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return re.sub(r"([|*_`\\])", r"\\\1", _flat(text))


def _flat(text: str) -> str:
    return ", ".join(text.splitlines())
