r"""Expressions of a configuration: names with arguments.

Examples are `dirichlet(0.1)` and `stages(fedavg:100, fedmr(unit=segment, fraction=0.5))`.

    value = number | 'text' | true | false | none | [value, ...] | call    (text with Python's
        escapes, such as \' and \n)
    call  = path [ "(" argument, ... ")" ] [ ":" (number | name) ]
    path  = name [ ":" Name ]                                     (a user's class,
        package.module:Class)
    argument = [ name "=" ] value

A bare word is a call without arguments; the reader decides whether it is a name or text. Python's
`ast` reads neither `fedavg:100` nor names such as `f1-macro`, so the grammar has a parser.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fedloom.common.errors import InvalidValue, quoted, shortened

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan)(?![\w.\-(]))"
    r"|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[A-Za-z_][\w.\-]*)|(?P<mark>[()\[\],=:])|(?P<end>\Z)|(?P<other>\S))"
)
_WORDS = {"true": True, "false": False, "none": None}
DEEPEST = 50
"""Largest number of levels of nested lists, tables and arguments."""


@dataclass(frozen=True)
class Call:
    """A name, or `module:Class`, with its arguments.

    `until` is the value after a colon, such as the last round of a stage.
    """

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
    """Read one value.

    Raises:
        InvalidValue: The text is not a value; the error quotes the text from the first wrong
            character.
    """
    parser = _Parser(text)
    value = parser.value()
    if parser.tokens[parser.next][0] != "end":
        raise parser.fail()
    return value


@lru_cache(maxsize=1024)
def parse(text: str) -> Call:
    """Read one call.

    Raises:
        InvalidValue: The text is not a call.
    """
    value = parse_value(text)
    if not isinstance(value, Call):
        raise InvalidValue(
            f"{quoted(text)} is not a name with arguments, such as fedmr or dirichlet(0.1)"
        )
    return value


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.next = 0
        self.depth = 0
        matches = ((match, match.lastgroup or "") for match in _TOKEN.finditer(text))
        self.tokens = [(kind, match[kind], match.start(kind)) for match, kind in matches]
        self.tokens.append(("end", "", len(text)))  # `_call` looks two tokens ahead

    def fail(self) -> InvalidValue:
        position = self.tokens[self.next][2]
        beginning = re.search(r"[^\s,()\[\]=]*$", self.text[:position])
        word = (beginning[0] if beginning else "") + re.split(
            r"[\s,()\[\]]", self.text[position:], maxsplit=1
        )[0]
        quotable = re.search(r"[/\\~.]", word) and "'" not in word
        remedy = f": put quotes around it, '{shortened(word)}'" if quotable else ""
        reason = f"from character {position + 1} on: {quoted(self.text[position:])}{remedy}"
        return InvalidValue(f"cannot read {quoted(self.text)} {reason}")

    def _take(self, mark: str) -> bool:
        matches = self.tokens[self.next][:2] == ("mark", mark)
        self.next += matches
        return matches

    def _until(self, mark: str) -> Iterator[None]:
        """Yield before each of the entries, separated by commas, in front of a mark."""
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
        value: Any = _WORDS.get(token.lower())
        try:
            if kind == "number":
                value = int(token) if re.fullmatch(r"[-+]?\d+", token) else float(token)
            elif kind == "text":
                # a backslash that begins no escape is a literal backslash
                with warnings.catch_warnings(action="ignore"):
                    value = ast.literal_eval(token)
            elif kind != "name":
                raise ValueError
        except (SyntaxError, ValueError):  # a broken escape, thousands of digits
            raise self.fail() from None
        self.next += 1
        return self._call(token) if kind == "name" and token.lower() not in _WORDS else value

    def _call(self, name: str) -> Call:
        following = self.tokens[self.next + 1][1]
        if re.fullmatch(r"([\w.]+\.)?_*[A-Z]\w*", following) and self._take(":"):
            name = f"{name}:{following}"
            self.next += 1
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for _ in self._until(")") if self._take("(") else ():
            (kind, argument, _), (_, following, _) = self.tokens[self.next : self.next + 2]
            if kind == "name" and following == "=":
                if argument in named:
                    raise InvalidValue(f"{quoted(self.text)} sets {quoted(argument)} twice")
                self.next += 2
                named[argument] = self.value()
            elif named:
                raise InvalidValue(
                    f"{quoted(self.text)}: arguments without a name must come before named ones"
                )
            else:
                positional.append(self.value())
        return Call(
            name, tuple(positional), named, plain(self.value()) if self._take(":") else None
        )


def plain(value: Any) -> Any:
    """Return a value with bare words and `module:name` as text, also inside lists.

    Raises:
        InvalidValue: The value contains any other call.
    """
    if isinstance(value, Call):
        if value.positional or value.named or not isinstance(value.until, str | None):
            raise InvalidValue(
                f"{quoted(value, str)} is not allowed here (allowed: a number, text or list)"
            )
        return value.name if value.until is None else f"{value.name}:{value.until}"
    return [plain(item) for item in value] if isinstance(value, list) else value
