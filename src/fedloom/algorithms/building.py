"""Methods from expressions such as `stages(fedavg:100, fedmr(unit=segment))`."""

from dataclasses import replace
from typing import Any, cast

from fedloom.algorithm import Algorithm, algorithms
from fedloom.config.expression import Call, parse, show
from fedloom.config.plugins import found_at
from fedloom.errors import InvalidValue, quoted


def build(expression: str | Call | Algorithm) -> Algorithm:
    """Return the method of an expression.

    Args:
        expression: Such as `fedmr(unit=segment, fraction=0.5)` or `my_methods:HalfStep(step=0.9)`; a method is returned as it is.

    Raises:
        UnknownName: If nothing is registered under a name.
        InvalidValue: If a value or a parameter does not fit.
    """
    if isinstance(expression, Algorithm):
        return expression
    if not isinstance(expression, str | Call):
        kind = "class" if isinstance(expression, type) else type(expression).__name__
        raise InvalidValue(f"no method but a {kind}: give an object such as FedMR(), or text such as 'fedmr'")
    call = parse(expression) if isinstance(expression, str) else expression
    if call.until is not None:
        raise InvalidValue(f"{quoted(call, str)}: a last round (:{quoted(call.until, str)}) belongs inside stages(...)")
    name = _registered(call.name) if ":" in call.name and call.name not in algorithms else call.name
    entry = algorithms[name]
    stages = [_stage(value) for value in call.positional] if entry.make.variadic else None
    options = entry.options(call.positional if stages is None else (stages,), call.named)
    for wrapped in options.keys() & {*entry.make.wraps}:
        if isinstance(options[wrapped], Call):
            options[wrapped] = build(options[wrapped])
    return cast(Algorithm, algorithms.build(Call(name, named=options)))


def _registered(path: str) -> str:
    """Return the name under which the class at `module:Class` is registered: its path where it has given itself none."""
    kind = found_at(path, "algorithm", "a registered name or 'package.module:Class'")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise InvalidValue(f"algorithm {quoted(path)} is no method: a method is a class that extends fedloom.Algorithm")
    entry = algorithms.of(kind)
    if entry is None:
        algorithms.register(path)(kind)
    return path if entry is None else entry.name


def _stage(value: Any) -> tuple[Algorithm, Any]:
    if not isinstance(value, Call):
        raise InvalidValue(f"{quoted(value, show)} is not a method with its last round, such as fedavg:100")
    return build(replace(value, until=None)), value.until
