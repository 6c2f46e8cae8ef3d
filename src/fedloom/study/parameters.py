"""Parameters of the methods inside an expression, by key: `algorithm.mu`, or `algorithm.fedprox.mu`
where several have it.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fedloom.algorithm.method import Method, components, method_fields, name_of
from fedloom.common.errors import InvalidValue
from fedloom.common.expression import parse_value, plain
from fedloom.common.fields import parameters

PREFIX = "algorithm."


def parameter_keys(outer: Method) -> list[str]:
    """Return every key that names one parameter of one of the nested methods, the short form first
    where it is enough.
    """
    keys = Counter(
        key for method in components(outer) for keys in _parameters(method).values() for key in keys
    )
    unique = [key for key, count in keys.items() if count == 1]
    return sorted(unique, key=lambda key: key.count("."))


def with_parameters(outer: Method, changes: Mapping[str, Any]) -> Method:
    """Return a copy of a method with parameters set.

    Args:
        outer: The method, which may contain others. It stays unchanged.
        changes: Values by the keys of `parameter_keys`; text is read as in an expression. Other
            keys are ignored.

    Returns:
        The copy.

    Raises:
        InvalidValue: A value is not allowed.
        UnknownName: A value is a name that does not exist.
    """
    outer = copy.deepcopy(outer)
    for method in components(outer):
        for name, keys in _parameters(method).items():
            for key in changes.keys() & keys:
                setattr(method, name, _value(changes[key]))
        method.__post_init__()
    return outer


def _parameters(method: Method) -> dict[str, tuple[str, str]]:
    """Return the parameters of a method that are no methods themselves, each with its keys."""
    holders = method_fields(type(method))
    names = [name for name in parameters(type(method)) if name not in holders]
    return {name: (f"{PREFIX}{name}", f"{PREFIX}{name_of(method)}.{name}") for name in names}


def _value(value: Any) -> Any:
    with suppress(InvalidValue):
        return plain(parse_value(value)) if isinstance(value, str) else value
    return value
