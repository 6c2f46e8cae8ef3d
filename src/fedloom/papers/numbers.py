"""What the papers print, as shipped with the package."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

Number = dict[str, Any]
"""One printed value: paper, table, model, dataset, heterogeneity, participation, method, metric and its figures."""


@cache
def _all() -> tuple[Number, ...]:
    text = (files("fedloom.papers") / "numbers.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def printed(paper: str, table: str) -> list[Number]:
    """The values of a paper's table (`fedumf`, `A2`), in the order in which they are printed."""
    return [number for number in _all() if number["paper"] == paper and number["table"] == table]
