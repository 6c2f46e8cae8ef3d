"""Field types and their allowed values are equal in Python, expressions and files."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.algorithm import Algorithm
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import (
    LARGEST,
    BelowOne,
    Count,
    NonNegative,
    Positive,
    Probability,
    Share,
    require_fields,
)
from fedloom.common.training import Training
from fedloom.rounds.schedule import Schedule


@dataclass(frozen=True)
class Settings:
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0
    share: Share = 1.0
    probability: Probability = 0.0
    below_one: BelowOne = 0.0
    count: Count | None = 1
    word: Literal["mean", "median"] | float = "mean"
    items: list[Share] = field(default_factory=list)
    method: Algorithm | None = None

    def __post_init__(self) -> None:
        require_fields(self)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("positive", 0, "positive must be greater than 0 and at most 3.4e+38, not 0"),
        ("positive", 1e300, "positive must be greater than 0 and at most 3.4e+38, not 1e+300"),
        ("positive", "1", "positive must be a number, not '1'"),
        ("non_negative", -1, "non_negative must be at least 0 and at most 3.4e+38, not -1"),
        ("share", 0, "share must be in (0, 1], not 0"),
        ("probability", 1.5, "probability must be between 0 and 1, not 1.5"),
        ("below_one", 1, "below_one must be in [0, 1), not 1"),
        ("count", 0, "count must be at least 1, not 0"),
        ("count", 2.5, "count must be a whole number, not 2.5"),
        ("count", True, "count must be a whole number, not true"),
        (
            "word",
            "medain",
            "word must be 'mean' or 'median' or a number, not 'medain': did you mean 'median'?",
        ),
        ("items", [0.5, 2], "items[1] must be in (0, 1], not 2"),
        ("items", 0.5, "items must be a list, not 0.5"),
        ("method", "fedavg", "method must be a method, such as fedavg, not 'fedavg'"),
    ],
)
def test_values_that_are_not_allowed_are_refused_in_one_line(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        Settings(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_numbers_are_converted_to_the_types_of_their_fields() -> None:
    settings = Settings(positive=2, count=np.int64(3), share=np.float32(0.5), method=FedAvg())  # type: ignore[arg-type]
    assert (type(settings.positive), type(settings.count), type(settings.share)) == (
        float,
        int,
        float,
    )
    assert (settings.positive, settings.count, settings.share, settings.word) == (2, 3, 0.5, "mean")


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_ranges_hold_for_every_float(value: float) -> None:
    """A field accepts exactly the floats in its range; infinity and NaN are in no range."""
    inside = {
        "positive": 0 < value <= LARGEST,
        "non_negative": 0 <= value <= LARGEST,
        "share": 0 < value <= 1,
        "probability": 0 <= value <= 1,
        "below_one": 0 <= value < 1,
    }
    for name, allowed in inside.items():
        if allowed:
            assert getattr(Settings(**{name: value}), name) == value  # type: ignore[arg-type]
        else:
            with pytest.raises(InvalidValue, match=f"{name} must be"):
                Settings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "momentum", "decay", "clip"])
def test_python_is_told_what_a_file_is(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=f"{name} must be"):
        Training(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dropout", "new_clients"])
def test_at_least_one_client_must_be_left(name: str) -> None:
    with pytest.raises(InvalidValue, match=rf"{name} must be in \[0, 1\), not 1"):
        Schedule(**{name: 1})  # type: ignore[arg-type]


def test_a_method_is_a_dataclass_by_itself_and_the_decorator_changes_nothing() -> None:
    class Plain(FedAvg):
        share: float = 0.5
        names: list[str] = field(default_factory=list)
        late: bool = field(default=True, kw_only=True)

    @dataclass
    class Decorated(FedAvg):
        share: float = 0.5
        names: list[str] = field(default_factory=list)
        late: bool = field(default=True, kw_only=True)

    for kind in (Plain, Decorated):
        method = kind(False, 0.25)
        assert (method.weighted, method.share, method.names, method.late) == (False, 0.25, [], True)
        assert method == kind(False, 0.25)
        assert inspect.signature(kind).parameters["late"].kind is inspect.Parameter.KEYWORD_ONLY
        with pytest.raises(InvalidValue, match="share must be a number"):
            kind(share="much")  # type: ignore[arg-type]
