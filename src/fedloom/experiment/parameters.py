"""Parameters of the methods inside an expression, by key: `algorithm.mu`, or `algorithm.fedprox.mu` where several have it."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fedloom.algorithm import Algorithm, algorithms
from fedloom.algorithms.building import build
from fedloom.config.expression import parse_value, plain
from fedloom.errors import InvalidValue

PREFIX = "algorithm."


def parameter_keys(expression: str) -> list[str]:
    """Return every key that names one parameter of one method of the expression, the short form first where it is enough."""
    keys = Counter(
        key for method in build(expression).nested() for keys in _parameters(method).values() for key in keys
    )
    unique = [key for key, count in keys.items() if count == 1]
    return sorted(unique, key=lambda key: key.count("."))


def with_parameters(expression: str, changes: Mapping[str, Any]) -> str:
    """Return the expression with parameters set. Raise `InvalidValue` or `UnknownName` for a wrong one."""
    outer = build(expression)
    for method in outer.nested():
        for name, keys in _parameters(method).items():
            for key in changes.keys() & keys:
                setattr(method, name, _value(changes[key]))
        method.__post_init__()
    return str(outer)


def _parameters(method: Algorithm) -> dict[str, tuple[str, str]]:
    """Return the parameters of a method that are no methods themselves, each with its keys."""
    entry = algorithms.of(type(method))
    if entry is None:
        return {}
    names = [name for name in entry.parameters if name not in method.wraps]
    return {name: (f"{PREFIX}{name}", f"{PREFIX}{entry.name}.{name}") for name in names}


def _value(value: Any) -> Any:
    with suppress(InvalidValue):
        return plain(parse_value(value)) if isinstance(value, str) else value
    return value
