"""The numbers that the papers print."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

Words = Mapping[str, Any]
"""Values by word, such as `dataset` and `method`."""


@cache
def _numbers() -> tuple[Words, ...]:
    return tuple(json.loads((files("fedloom.reviews.papers") / "numbers.json").read_text("utf-8")))


def printed(version: str, table: str) -> list[Words]:
    """Return the numbers of a paper's table in the printed order.

    Args:
        version: The paper, such as `fedumf`.
        table: The table, such as `A2`.

    Returns:
        Each number with its words, such as data set, heterogeneity and method.
    """
    return [
        number for number in _numbers() if number["paper"] == version and number["table"] == table
    ]
