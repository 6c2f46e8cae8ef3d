"""The grammar of expressions: printed values parse back, and bad expressions are refused in one
line.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.common.expression import Call, parse, parse_value, show
from fedloom.parts.building import build
from fedloom.runs.config_file import put

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,6}", fullmatch=True).filter(
    lambda name: name.lower() not in ("true", "false", "none", "inf", "nan")
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    PLAIN,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.builds(
            Call,
            NAMES,
            st.lists(inside, max_size=2).map(tuple),
            st.dictionaries(NAMES, inside, max_size=2),
            st.none() | st.integers(0) | st.text(),
        )
    ),
    max_leaves=8,
)


@given(VALUES)
def test_shown_values_are_read_back(value: Any) -> None:
    parsed = parse_value(show(value))
    assert parsed == value
    assert show(parsed) == show(value)  # 1, 1.0 and true are equal


@given(st.text())
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    with suppress(InvalidValue):
        parse_value(text)
        return
    with pytest.raises(InvalidValue, match=r"^[^\n]*$"):
        parse_value(text)


@given(st.text(alphabet="abe1.,:='\"()[]{}\\-\n ", max_size=20))
def test_any_setting_on_the_command_line_is_plain(text: str) -> None:
    """Any text after key= becomes a TOML value, also in nested lists."""
    table: dict[str, Any] = {}
    put(table, f"key={text}")
    assert plain(table["key"])


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(plain, value.values()))
    return all(map(plain, value)) if isinstance(value, list) else not isinstance(value, Call)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'C:\data'", "C:\\data"),  # a backslash that begins no escape is literal
        (r"'a\'b'", "a'b"),
        (r'"a\nb"', "a\nb"),
        ("-inf", float("-inf")),
        ("infimum", Call("infimum")),
        ("[[iid], [dirichlet(0.1)]]", [[Call("iid")], [Call("dirichlet", (0.1,))]]),
    ],
)
def test_a_value_is_read(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_lists_in_lists_hold_text() -> None:
    table: dict[str, Any] = {}
    put(table, "x.y=[[iid, dirichlet(0.1)], 3]")
    assert table == {"x": {"y": [["iid", "dirichlet(0.1)"], 3]}}


@pytest.mark.parametrize(
    "text",
    ["a(" * 60, "[" * 5000, "9" * 5000, r"'\x'", "'open", "f(a=1, a=2)", "f(a=1, 2)", "f:", ""],
)
def test_bad_expressions_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_value(text)
    assert len(str(caught.value).splitlines()) == 1
    put({}, f"key={text}")  # as text


@pytest.mark.parametrize(
    "text",
    [
        "stages(fedavg:100, fedmr(unit=segment, fraction=0.5))",
        "stages(fedprox(mu=0.1):auto, fedmr(blend=[[1, 0.5], [20, 0.0]]))",
        "ala(umf(feddc), p=2)",
    ],
)
def test_method_expressions_round_trip(text: str) -> None:
    method = build(text)
    repeated = build(str(method))
    assert (repeated, str(repeated)) == (method, str(method))
    assert parse(str(parse(text))) == parse(text)


def test_method_parameters_take_only_methods() -> None:
    for text in (
        "ala(3)",
        "ala(method='fedavg')",
        "stages(3)",
        "stages([fedavg:2])",
        "fedprox(mu=fedavg)",
        "fedprox(mu=a(1))",
    ):
        with pytest.raises(FedloomError) as caught:
            build(text)
        assert len(str(caught.value).splitlines()) == 1
