r"""Expressions of a configuration: `dirichlet(0.1)`, `stages(fedavg:100, fedmr(unit=segment, fraction=0.5))`.

    value = number | 'text' | true | false | none | [value, ...] | call    (text with Python's escapes, such as \' and \n)
    call  = path [ "(" argument, ... ")" ] [ ":" (number | name) ]
    path  = name [ ":" Name ]                                     (a class of the user's own, package.module:Class)
    argument = [ name "=" ] value

A bare word is a call without arguments; the reader decides whether it is a name or a piece of text. Python's `ast` reads neither
`fedavg:100` nor names such as `f1-macro`, so the grammar has a parser.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fedloom.errors import InvalidValue, quoted, shortened

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan)(?![\w.\-(]))"
    r"|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[A-Za-z_][\w.\-]*)|(?P<mark>[()\[\],=:]))"
)
_WORDS = {"true": True, "false": False, "none": None}
DEEPEST = 50
"""Levels of nested lists, tables and arguments, at most."""


@dataclass(frozen=True)
class Call:
    """A name, or `module:Class`, with its arguments; `until` is the value after a colon (the last round of a stage)."""

    name: str
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    until: Any = None

    def __str__(self) -> str:
        arguments = [show(value) for value in self.positional]
        arguments += [f"{name}={show(value)}" for name, value in self.named.items()]
        inside = f"({', '.join(arguments)})" if arguments else ""
        return f"{self.name}{inside}" + ("" if self.until is None else f":{show(self.until)}")


def show(value: Any) -> str:
    """Return a value as the grammar writes it; `parse(show(value)) == value`."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(show(item) for item in value)}]"
    return str(value)


def parse_value(text: str) -> Any:
    """Read one value. Raise `InvalidValue`, which quotes the text from the first character that does not fit."""
    parser = _Parser(text)
    value = parser.value()
    if parser.tokens[parser.next][0] != "end":
        raise parser.fail()
    return value


@lru_cache(maxsize=1024)
def parse(text: str) -> Call:
    """Read one call. Raises as `parse_value`, and for another value."""
    value = parse_value(text)
    if not isinstance(value, Call):
        raise InvalidValue(f"{quoted(text)} is not a name with arguments, such as fedmr or dirichlet(0.1)")
    return value


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise self._error(position)
            self.tokens.append((match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            position = match.end()
        self.tokens += 2 * [("end", "", len(text))]  # so that there are always two to look at
        self.next = 0
        self.depth = 0

    def _error(self, position: int) -> InvalidValue:
        remainder = quoted(self.text[position:])
        before = re.search(r"[^\s,()\[\]=]*$", self.text[:position])
        word = (before[0] if before else "") + re.split(r"[\s,()\[\]]", self.text[position:], maxsplit=1)[0]
        remedy = (
            f": put quotes around it, '{shortened(word)}'" if re.search(r"[/\\~.]", word) and "'" not in word else ""
        )
        return InvalidValue(f"cannot read {quoted(self.text)} from character {position + 1} on: {remainder}{remedy}")

    def fail(self) -> InvalidValue:
        return self._error(self.tokens[self.next][2])

    def _take(self, mark: str) -> bool:
        matches = self.tokens[self.next][:2] == ("mark", mark)
        self.next += matches
        return matches

    def _until(self, mark: str) -> Iterator[None]:
        """Yield before each of the entries that stand with commas between them in front of a mark."""
        while not self._take(mark):
            yield
            if not self._take(",") and self.tokens[self.next][:2] != ("mark", mark):
                raise self.fail()

    def value(self) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            raise InvalidValue(f"{quoted(self.text)} nests more than {DEEPEST} levels deep")
        value = [self.value() for _ in self._until("]")] if self._take("[") else self._word()
        self.depth -= 1
        return value

    def _word(self) -> Any:
        kind, token, _ = self.tokens[self.next]
        if kind in ("mark", "end"):
            raise self.fail()
        try:
            if kind == "number":
                value = int(token) if re.fullmatch(r"[-+]?\d+", token) else float(token)
            elif kind == "text":
                with warnings.catch_warnings(
                    action="ignore"
                ):  # a backslash before any other character stands for itself
                    value = ast.literal_eval(token)
        except (SyntaxError, ValueError):  # a broken escape, thousands of digits
            raise self.fail() from None
        self.next += 1
        if kind == "name":
            return _WORDS[token.lower()] if token.lower() in _WORDS else self._call(token)
        return value

    def _call(self, name: str) -> Call:
        following = self.tokens[self.next + 1][1]
        if re.fullmatch(r"([\w.]+\.)?_*[A-Z]\w*", following) and self._take(":"):
            name = f"{name}:{following}"
            self.next += 1
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for _ in self._until(")") if self._take("(") else ():
            self._argument(positional, named)
        return Call(name, tuple(positional), named, plain(self.value()) if self._take(":") else None)

    def _argument(self, positional: list[Any], named: dict[str, Any]) -> None:
        (kind, name, _), (_, following, _) = self.tokens[self.next : self.next + 2]
        if kind == "name" and following == "=":
            if name in named:
                raise InvalidValue(f"{quoted(self.text)} gives {quoted(name)} twice")
            self.next += 2
            named[name] = self.value()
        elif named:
            raise InvalidValue(f"{quoted(self.text)}: arguments without a name come before those with one")
        else:
            positional.append(self.value())


def plain(value: Any) -> Any:
    """Return a value with bare words as text, inside lists too. Raise `InvalidValue` for any other call."""
    if isinstance(value, Call):
        if value.positional or value.named or value.until is not None:
            raise InvalidValue(f"{quoted(value, str)} is not allowed here: a number, text or list is")
        return value.name
    return [plain(item) for item in value] if isinstance(value, list) else value
