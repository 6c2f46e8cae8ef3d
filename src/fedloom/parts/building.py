"""Methods from expressions such as `stages(fedavg:100, fedmr(unit=segment))`."""

from dataclasses import replace
from typing import Any, cast

from fedloom.algorithm.method import Method, algorithms, method_fields
from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.expression import Call, parse, show
from fedloom.common.plugins import found_at
from fedloom.parts.course import require_fitting
from fedloom.parts.stages import Stages


def build(expression: str | Call | Method) -> Method:
    """Return the method of an expression.

    Args:
        expression: Text such as `fedmr(unit=segment, fraction=0.5)` or
            `my_methods:HalfStep(step=0.9)`. A method is returned unchanged.

    Returns:
        An algorithm, or parts around one.

    Raises:
        UnknownName: If a name is not registered.
        InvalidValue: If a value or a parameter is not allowed, or parts do not fit together.
    """
    if isinstance(expression, Method):
        require_fitting(expression)
        return expression
    if not isinstance(expression, str | Call):
        kind = "class" if isinstance(expression, type) else type(expression).__name__
        remedy = "give an object such as FedMR(), or text such as 'fedmr'"
        raise InvalidValue(f"expected a method, got a {kind}: {remedy}")
    call = parse(expression) if isinstance(expression, str) else expression
    if call.until is not None:
        until = quoted(call.until, str)
        raise InvalidValue(
            f"{quoted(call, str)}: a last round (:{until}) is only allowed inside stages(...)"
        )
    name = call.name
    if ":" in name and name not in algorithms:
        name = _registered(name)
    entry = algorithms[name]
    positional: tuple[Any, ...] = call.positional
    if entry.make is Stages:
        positional = ([_stage(value) for value in call.positional],)
    options = entry.options(positional, call.named)
    for field in options.keys() & method_fields(entry.make):
        if isinstance(options[field], Call):
            options[field] = build(options[field])
    method = cast(Method, algorithms.build(Call(name, named=options)))
    require_fitting(method)
    return method


def _registered(path: str) -> str:
    """Return the name under which the class at `module:Class` is registered. If there is none,
    register it by its path.
    """
    kind = found_at(path, "algorithm", "a registered name or 'package.module:Class'")
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        reason = "is not a method: give a class that extends fedloom.Algorithm"
        raise InvalidValue(f"algorithm {quoted(path)} {reason}")
    entry = algorithms.of(kind)
    if entry is None:
        algorithms.register(path)(kind)
    return path if entry is None else entry.name


def _stage(value: Any) -> tuple[Method, Any]:
    if not isinstance(value, Call):
        reason = "is not a method with its last round, such as fedavg:100"
        raise InvalidValue(f"{quoted(value, show)} {reason}")
    return build(replace(value, until=None)), value.until
