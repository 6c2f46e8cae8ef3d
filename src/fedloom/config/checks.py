"""Range checks whose errors name the value and what is allowed."""

from __future__ import annotations

from fedloom.errors import InvalidValue, quoted, suggestion


def require_at_least(name: str, value: float, least: float) -> None:
    """Raise `InvalidValue` unless value >= least."""
    if not value >= least:
        raise InvalidValue(f"{name} must be at least {least}, not {quoted(value)}")


def require_between(name: str, value: float, low: float, high: float) -> None:
    """Raise `InvalidValue` unless low <= value <= high."""
    if not low <= value <= high:
        raise InvalidValue(f"{name} must be between {low} and {high}, not {quoted(value)}")


def require_share(name: str, value: float) -> None:
    """Raise `InvalidValue` unless 0 < value <= 1."""
    if not 0 < value <= 1:
        raise InvalidValue(f"{name} must be in (0, 1], not {quoted(value)}")


def require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise `InvalidValue`, with the nearest allowed word, unless value is allowed."""
    if value not in allowed:
        raise InvalidValue(
            f"{name} {quoted(value)} is not allowed{suggestion(value, allowed)} (allowed: {', '.join(allowed)})"
        )
