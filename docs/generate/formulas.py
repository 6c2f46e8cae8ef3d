"""Converts formulas of docstrings to MathML, which browsers set without scripts or remote fonts.

A docstring writes `w <- w_t - eta * sum_i g_i^2` in plain text among its prose. A formula is what
this grammar reads and what has an operator, an index or an exponent:

    formula = sum (relation sum)*          relation = <- -> = != <= >= < >
    sum     = product (("+" | "-") product)*
    product = factor ("*" | "/" | factor)*
    factor  = "-"? base (index | exponent | "[" ... "]" | "(" ... ")")*
    base    = number | letter | Greek letter | function | "(" ... ")" | "||" sum "||" | "{" ... "}" | "<" sum "," sum ">"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eta": "η", "theta": "θ", "lambda": "λ",
    "mu": "μ", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ",
}  # fmt: skip
SIGNS = {"sum": "∑", "grad": "∇"}
FUNCTIONS = {
    "sqrt",
    "exp",
    "log",
    "max",
    "min",
    "cos",
    "mean",
    "ceil",
    "floor",
    "sign",
    "clip",
    "var",
    "softmax",
}
RELATIONS = {"<-": "←", "->": "→", "<=": "≤", ">=": "≥", "!=": "≠", "=": "=", "<": "<", ">": ">"}
PRODUCTS = {"*": "·", "/": "/", "mod": "mod"}
CLOSING = {"(": ")", "[": "]", "{": "}"}
STOPS = re.compile(
    "an?|the|of|and|or|for|with|in|is|are|be|to|from|by|on|as|at|all|any|every|each|its|their|it|over|than|that|this|what|where|"
    "which|when|while|if|not|no|one|two|but|so|after|before|beside|mean|max|min|sum|more|less"
)
"""Words that are prose unless an index or a bracket follows."""

TOKEN = re.compile(
    r"`[^`]*`|\d+(?:\.\d+)?(?:e-?\d+)?|[A-Za-z]+\d*'?|<-|->|<=|>=|!=|\|\||\.\.\.|\s+|.", re.S
)


class _NoFormula(Exception):
    """The tokens from here on are prose."""


class _Reader:
    """Reads one formula from tokens; `strong` is True once there is more than a lone symbol."""

    def __init__(self, tokens: list[str], position: int) -> None:
        self.tokens, self.position, self.strong, self.compact = tokens, position, False, False

    def peek(self, ahead: int = 0) -> str:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else ""

    def begins(self) -> bool:
        """Return True unless the next token is a word that no operator, index or bracket follows."""
        if (
            not re.fullmatch(r"[A-Za-z]{2,}'?|`[^`]*`", self.peek())
            or self.peek() in GREEK
            or self.peek() in SIGNS
        ):
            return True
        if self.peek().startswith("`"):
            return False
        following = self.peek(2) if self.peek(1).isspace() else self.peek(1)
        touching = self.peek(1) in ("_", "^", "[", "(")
        return touching or (
            following in {*RELATIONS, "*", "/", "+", "-"}
            and not STOPS.fullmatch(self.peek())
            and self.peek(1).isspace()
        )

    def spaced(self) -> int:
        """Return 1 if a space comes next."""
        return int(self.peek().isspace())

    def attempt(self, read: Callable[[], str]) -> str:
        """Return the result of `read`, or "" without a change of position if there is no formula."""
        state = self.position, self.strong
        try:
            return read()
        except _NoFormula:
            self.position, self.strong = state
            return ""

    def chain(self, signs: dict[str, str], operand: Callable[[], str]) -> str:
        """Read parts with any of the operators between them."""
        text = operand()
        while True:

            def operation() -> str:
                space = self.spaced()
                sign = self.peek(space)
                if sign not in signs or (
                    sign in "+-"
                    and not self.compact
                    and not (space and self.peek(space + 1).isspace())
                ):
                    raise _NoFormula
                self.position += space + 1 + int(self.peek(space + 1).isspace())
                drawn = operand()
                self.strong = True
                return f"<mo>{escape(signs[sign])}</mo>{drawn}"

            if not (addition := self.attempt(operation)):
                return text
            text += addition

    def formula(self) -> str:
        return self.chain(RELATIONS, self.sum)

    def sum(self) -> str:
        return self.chain({"+": "+", "-": "−"}, self.product)

    def product(self) -> str:
        text = self.chain(PRODUCTS, lambda: self.factor(leading=True))

        def beside() -> str:
            self.position += self.spaced()
            if self.peek() == "(" and self.peek(1).startswith("`"):
                raise _NoFormula  # an option in brackets
            return f"<mo>&#8290;</mo>{self.factor(leading=False)}"

        while addition := self.attempt(beside):
            text += addition + self.attempt(lambda: self.chain_rest(PRODUCTS))
        return text

    def chain_rest(self, signs: dict[str, str]) -> str:
        """Read operators with parts after a factor that was beside another."""
        space = self.spaced()
        if self.peek(space) not in signs:
            raise _NoFormula
        sign = self.peek(space)
        self.position += space + 1
        self.position += self.spaced()
        drawn = self.factor(leading=True)
        self.strong = True
        return f"<mo>{signs[sign]}</mo>{drawn}"

    def factor(self, leading: bool) -> str:
        sign = ""
        if leading and self.peek() == "-":
            self.position, sign = self.position + 1, "<mo>−</mo>"
        base = self.base(leading)
        while True:
            mark = self.peek()
            if mark in ("_", "^"):
                self.position += 1
                script = self.script()
                opposite = "^" if mark == "_" else "_"
                if self.peek() == opposite:
                    self.position += 1
                    lower, upper = (
                        (script, self.script()) if mark == "_" else (self.script(), script)
                    )
                    base = f"<msubsup>{base}{lower}{upper}</msubsup>"
                else:
                    base = f"<{'msub' if mark == '_' else 'msup'}>{base}{script}</{'msub' if mark == '_' else 'msup'}>"
                self.strong = True
            elif mark == "[" and not self.tokens[self.position - 1].isspace():
                base += self.bracket()
                self.strong = True
            elif (
                mark == "+"
                and self.tokens[self.position - 2] == "_"
                and self.peek(1)[:1] in ("", " ", ")", ",")
            ):
                self.position += 1  # c_i+ is the next c_i
                base = f"<msup>{base}<mo>+</mo></msup>"
            else:
                return sign + base

    def script(self) -> str:
        """Read an index or an exponent."""
        mark = self.peek()
        if mark in ("{", "("):
            compact, self.compact = self.compact, True
            inner = self.bracket(drawn=False)
            self.compact = compact
            return f"<mrow>{inner}</mrow>"
        if mark == "+":
            self.position += 1
            return "<mo>+</mo>"
        if mark == "-":
            self.position += 1
            return f"<mrow><mo>−</mo>{self.script()}</mrow>"
        if not re.fullmatch(r"[A-Za-z0-9.]+'?|`[^`]*`", mark):
            raise _NoFormula
        self.position += 1
        if mark.startswith("`"):
            return f"<mtext><code>{escape(mark[1:-1])}</code></mtext>"
        if mark in GREEK:
            return f"<mi>{GREEK[mark]}</mi>"
        return f"<mn>{mark}</mn>" if mark[0].isdigit() else f"<mi>{mark}</mi>"

    def bracket(self, drawn: bool = True) -> str:
        opening = self.peek()
        self.position += 1
        elements = []
        while True:
            self.position += self.spaced()
            elements.append("<mo>…</mo>" if self.peek() == "..." else self.formula())
            self.position += self.peek() == "..."
            self.position += self.spaced()
            if self.peek() == CLOSING[opening]:
                break
            if self.peek() not in (",", ";"):
                raise _NoFormula
            elements.append(f"<mo>{self.peek()}</mo>")
            self.position += 1
        self.position += 1
        inner = "".join(elements)
        # Markdown reads brackets
        left, right = (f"<mo>&#{ord(sign)};</mo>" for sign in (opening, CLOSING[opening]))
        return f"<mrow>{left}{inner}{right}</mrow>" if drawn else inner

    def fenced(self, fence: str, sign: str) -> str:
        """Read a norm or an absolute value."""
        self.position += 1
        inner = self.sum()
        if self.peek() != fence:
            raise _NoFormula
        self.position += 1
        self.strong = True
        return f"<mrow><mo>{sign}</mo>{inner}<mo>{sign}</mo></mrow>"

    def base(self, leading: bool) -> str:
        token = self.peek()
        if token == "(":
            return self.bracket()
        if token == "{" and leading:
            return self.bracket()
        if token in ("||", "|"):
            return self.fenced(token, "‖" if token == "||" else "|")
        if token == "<" and not self.peek(1).isspace():
            self.position += 1
            left = self.sum()
            if self.peek() != ",":
                raise _NoFormula
            self.position += 1 + int(self.peek(1).isspace())
            right = self.sum()
            if self.peek() != ">":
                raise _NoFormula
            self.position, self.strong = self.position + 1, True
            return f"<mrow><mo>⟨</mo>{left}<mo>,</mo>{right}<mo>⟩</mo></mrow>"
        if token.startswith("`") and leading:
            self.position += 1
            return f"<mtext><code>{escape(token[1:-1])}</code></mtext>"
        if re.fullmatch(r"\d[\d.e-]*", token) and leading:
            self.position += 1
            return f"<mn>{token}</mn>"
        if not re.fullmatch(r"[A-Za-z]+\d*'?", token):
            raise _NoFormula
        follows = self.peek(1)
        word = len(token.rstrip("'0123456789")) > 1 and token not in GREEK and token not in SIGNS
        if token == "sqrt" and follows == "(":
            self.position += 1
            return f"<msqrt>{self.bracket(drawn=False)}</msqrt>"
        called = follows == "(" or follows in ("_", "^")
        if (
            (word or token in ("a", "A", "I"))
            and not called
            and (STOPS.fullmatch(token) or not leading)
            and not self.symbol(follows)
        ):
            raise _NoFormula
        if token in SIGNS and not (called or follows.isspace()):
            raise _NoFormula
        self.position += 1
        if token in SIGNS:
            return f"<mo>{SIGNS[token]}</mo>"
        if token in GREEK:
            return f"<mi>{GREEK[token]}</mi>"
        drawn = f"<mi>{token}</mi>"
        if letter := re.fullmatch(r"([A-Za-z])(\d+)", token):
            drawn = f"<msub><mi>{letter[1]}</mi><mn>{letter[2]}</mn></msub>"
        if follows == "(" and (word or token in FUNCTIONS or token in "LFGlfkv"):
            drawn += self.bracket()
            self.strong = True
        return drawn

    def symbol(self, follows: str) -> bool:
        """Return True if the letter `a` is a variable here: an operator, an index or a bracket
        comes next.
        """
        token = self.peek()
        if len(token) > 1:
            return False
        ahead = self.peek(2) if follows.isspace() else follows
        return ahead in {*RELATIONS, "*", "/", "+", ")", "]", ",", "_", "^", "["} or bool(
            re.fullmatch(r"[A-Za-z]|\(", ahead)
        )


def with_formulas(text: str, prose: Callable[[str], str]) -> str:
    """Return text with its formulas as MathML; the rest is shown by `prose`."""
    tokens = TOKEN.findall(text)
    shown, pending, position = [], "", 0
    while position < len(tokens):
        reader = _Reader(tokens, position)
        begins = (
            position == 0 or not re.fullmatch(r"\w", tokens[position - 1][-1:])
        ) and reader.begins()
        drawn = reader.attempt(reader.formula) if begins and not tokens[position].isspace() else ""
        if drawn and reader.strong:
            shown += [prose(pending), f"<math>{drawn}</math>"]
            pending, position = "", reader.position
        else:
            pending += tokens[position]
            position += 1
    return "".join([*shown, prose(pending)])
