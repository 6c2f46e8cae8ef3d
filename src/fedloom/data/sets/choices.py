"""The check of a parameter that takes one of a few words."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.errors import InvalidValue, suggestion


def check_choice(parameter: str, value: str, allowed: Sequence[str]) -> None:
    """Raise `InvalidValue`, with the nearest word, unless `value` is one of `allowed`."""
    if value not in allowed:
        near = suggestion(str(value), allowed)
        ending = f":{near}" if near else ""
        raise InvalidValue(f"{parameter} must be one of {', '.join(allowed)}, not {value!r}{ending}")
