"""Parameters of the methods inside an expression, by key: `algorithm.mu`, or `algorithm.fedprox.mu` where several have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fedloom.algorithm import algorithms, build, describe
from fedloom.config.expression import Call, parse
from fedloom.errors import InvalidValue

PREFIX = "algorithm."


def parameter_keys(expression: str) -> list[str]:
    """Every key that names one parameter of one method of the expression, the short form first where it is enough."""
    short: dict[str, int] = {}
    full: dict[str, int] = {}
    for call in _methods(parse(expression)):
        for name in _parameters(call):
            short[f"{PREFIX}{name}"] = short.get(f"{PREFIX}{name}", 0) + 1
            full[f"{PREFIX}{call.name}.{name}"] = full.get(f"{PREFIX}{call.name}.{name}", 0) + 1
    return [key for keys in (short, full) for key, times in keys.items() if times == 1]


def with_parameters(expression: str, changes: Mapping[str, Any]) -> str:
    """The expression with some parameters set, in the words of `describe`.

    Text is read as an expression where it is one. Raises `InvalidValue` or `UnknownName` for a value that is not allowed.
    """
    call = parse(expression)
    for key, value in changes.items():
        *method, name = key.removeprefix(PREFIX).split(".")
        call = _changed(call, method[0] if method else None, name, _expressed(value))
    return describe(build(call))


def _methods(call: Call) -> Iterator[Call]:
    """The call and all inside it that are methods."""
    if call.name in algorithms:
        yield call
    for value in (*call.positional, *call.named.values()):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Call):
                yield from _methods(item)


def _parameters(call: Call) -> list[str]:
    """The parameters that are no methods themselves."""
    entry = algorithms[call.name]
    return [name for name in entry.parameters if name not in entry.make.wraps]


def _changed(call: Call, method: str | None, name: str, value: Any) -> Call:
    """The call with the parameter set in each method that has it (and is called `method`, where that is given)."""

    def inside(item: Any) -> Any:
        if isinstance(item, list):
            return [inside(one) for one in item]
        return _changed(item, method, name, value) if isinstance(item, Call) else item

    changed = replace(
        call,
        positional=tuple(map(inside, call.positional)),
        named={key: inside(one) for key, one in call.named.items()},
    )
    if call.name not in algorithms or method not in (None, call.name) or name not in _parameters(call):
        return changed
    entry = algorithms[call.name]
    if entry.make.variadic:
        return replace(changed, named={**changed.named, name: value})
    return replace(changed, positional=(), named={**entry.options(changed.positional, changed.named), name: value})


def _expressed(value: Any) -> Any:
    if isinstance(value, list):
        return [_expressed(one) for one in value]
    try:
        return parse(value) if isinstance(value, str) else value
    except InvalidValue:
        return value
