"""Numbers of the papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.reviews.papers.printed import printed


def numbers_of(name: str) -> Sequence[Mapping[str, Any]]:
    """Return the printed numbers of a table, such as `fedumf.table-a2`."""
    paper, _, table = name.partition(".table-")
    return printed(paper, table.upper())
