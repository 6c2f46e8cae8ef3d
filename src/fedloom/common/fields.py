"""Allowed values of the fields of a dataclass and of the options of a function.

Their types declare ranges and choices:

    @dataclass
    class FedProx(Algorithm):
        mu: NonNegative = 0.01
        rule: Literal["mean", "median"] = "mean"

The same types are checked whether a value comes from Python (`require_fields`), from an expression
or from a file (`checked`). The only conversions are from integers to floats and from NumPy's
numbers to Python's: text is not a number, and true is not 1.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints, is_typeddict

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from fedloom.common.errors import InvalidValue, quoted, suggestion
from fedloom.common.expression import DEEPEST, show

LARGEST = 3.4e38
"""About the largest 32-bit float: a larger setting would become infinite in the computation."""

LARGEST_COUNT = 2**63 - 1
"""The largest 64-bit integer."""

Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0)]


def _in_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?) ?([kKMGT]?)(i?)B?", value)
    if match is None:
        raise PydanticCustomError("bytes", "bytes")
    return int(
        float(match[1])
        * (1024 if match[3] else 1000) ** " kMGT".index(match[2].replace("K", "k") or " ")
    )


Bytes = Annotated[int, Field(ge=0, le=LARGEST_COUNT), BeforeValidator(_in_bytes)]
"""A number of bytes, also with a unit: 500MB or "4GiB"."""


_PATHS = ("path", "folder", "file", "directory")
"""Names of options that contain a file's path."""


def require_fields(instance: Any) -> None:
    """Check the fields of a dataclass, in its `__post_init__`.

    Raises:
        InvalidValue: The type of a field does not allow its value.
    """
    values = {
        field.name: getattr(instance, field.name)
        for field in dataclasses.fields(instance)
        if field.init
    }
    for name, value in checked(type(instance), values).items():
        object.__setattr__(instance, name, value)  # also of a frozen one


def checked(make: Any, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values converted to their types.

    Args:
        make: Dataclass or function that declares the types.
        values: Values by name.
        prefix: Beginning of an error.

    Returns:
        The values by name, without defaults of missing ones.

    Raises:
        InvalidValue: A type does not allow its value.
    """
    plain = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
    }
    for name in plain.keys() & type_hints(make).keys():
        choices = get_args(type_hints(make)[name])
        if plain[name] is None and "none" in choices and type(None) not in choices:
            plain[name] = "none"  # the expression's word for nothing
    for name, value in plain.items():
        require_plain(value, f"{prefix}{name}")
        if (
            name in _PATHS
            and isinstance(value, str)
            and any(len(word.encode()) > 255 for word in value.split("/"))
        ):
            raise InvalidValue(
                f"{prefix}{name} must be a path of names of at most 255 bytes, not {quoted(value)}"
            )
    try:
        return dict(_adapter(make).validate_python(plain))
    except ValidationError as error:
        raise InvalidValue(f"{prefix}{_explained(error, type_hints(make))}") from None


def require_at_least(name: str, value: float, least: float) -> None:
    """Raise `InvalidValue` unless value >= least.

    Args:
        name: Name of the setting, with which the error begins.
        value: The value. NaN is refused.
        least: Smallest allowed value.
    """
    if not value >= least:
        raise InvalidValue(f"{name} must be at least {least}, not {quoted(value)}")


def require_between(name: str, value: float, low: float, high: float) -> None:
    """Raise `InvalidValue` unless low <= value <= high.

    Args:
        name: Name of the setting, with which the error begins.
        value: The value. NaN is refused.
        low: Smallest allowed value.
        high: Largest allowed value.
    """
    if not low <= value <= high:
        raise InvalidValue(f"{name} must be between {low} and {high}, not {quoted(value)}")


def require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise `InvalidValue`, with the most similar allowed word, unless the value is allowed.

    Args:
        name: Name of the setting, with which the error begins.
        value: The word.
        allowed: All allowed words.
    """
    if value not in allowed:
        near = suggestion(value, allowed)
        raise InvalidValue(
            f"{name} {quoted(value)} is not allowed{near} (allowed: {', '.join(allowed)})"
        )


def require_plain(value: object, name: str, level: int = 1) -> None:
    """Raise `InvalidValue` for broken text, numbers beyond the floats, and deeply nested lists.

    Args:
        value: A value of a configuration, such as text, a number, a list or a table.
        name: Name of the setting, with which the error begins.
        level: Depth of the value in nested lists and tables, from 1.
    """
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        raise InvalidValue(
            f"{name} must be text without NUL or lone surrogates, not {quoted(value)}"
        )
    if isinstance(value, int) and abs(value) > LARGEST:
        raise InvalidValue(
            f"{name} must be a number between {-LARGEST:g} and {LARGEST:g}, not {quoted(value)}"
        )
    if isinstance(value, (list, tuple, Mapping)):
        if level > DEEPEST:
            raise InvalidValue(f"{name} nests more than {DEEPEST} levels deep")
        for entry in value.values() if isinstance(value, Mapping) else value:
            require_plain(entry, name, level + 1)


def parameters(make: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters that a user may set.

    These are all fields of a dataclass, and all keyword-only parameters of other callables. The
    factory of a field is called for its default.
    """
    signature = inspect.signature(make).parameters
    if not dataclasses.is_dataclass(make):
        return {n: p for n, p in signature.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    made = {
        entry.name: entry.default_factory()
        for entry in dataclasses.fields(make)
        # A class of a notebook is pickled by value, with a copy of `dataclasses.MISSING`.
        if callable(entry.default_factory) and entry.name in signature
    }
    return {n: p.replace(default=made[n]) if n in made else p for n, p in signature.items()}


@cache
def type_hints(make: Any) -> dict[str, Any]:
    """Return the types of the parameters that a user may set, with the ranges that they declare."""
    if is_typeddict(make):
        return get_type_hints(make, include_extras=True)
    plain = inspect.isclass(make) and not dataclasses.is_dataclass(make)
    hints = get_type_hints(make.__init__ if plain else make, include_extras=True)
    return {name: hints.get(name, Any) for name in parameters(make)}


@cache
def _adapter(make: Any) -> TypeAdapter[Any]:
    options = TypedDict("options", type_hints(make), total=False)  # type: ignore[misc]
    return TypeAdapter(with_config(ConfigDict(strict=True, arbitrary_types_allowed=True))(options))


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "string_pattern_mismatch": "'module:name'",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "none_required": "none",
    "callable_type": "a class or function",
    "bytes": "a number of bytes, such as 4GiB",
}
"""Terms in error messages for pydantic's types of errors."""

_CLASSES = {
    "Algorithm": "a method, such as fedavg",
    "Sequence": "a list",
    "Stop": "a Stop, such as fl.Stop(20)",
}


def _explained(error: ValidationError, hints: Mapping[str, Any]) -> str:
    """Return the first error as one line.

    It has the value, the allowed values and, for words, the most similar one.
    """
    errors = error.errors(include_url=False)
    option = _option(errors[0]["loc"])
    # one for each type of a union
    errors = [details for details in errors if _option(details["loc"]) == option]
    hint = hints[str(errors[0]["loc"][0])]
    allowed = dict.fromkeys(_allowed(details, hint) for details in errors)
    value = errors[0]["input"]
    expected = "".join(str(details.get("ctx", {}).get("expected", "")) for details in errors)
    words = re.findall(r"'([^']*)'", expected)
    near = suggestion(value, words) if isinstance(value, str) else ""
    return f"{option} must be {' or '.join(allowed)}, not {quoted(value, show)}{near}"


def _option(location: tuple[str | int, ...]) -> str:
    return "".join(
        [str(location[0]), *(f"[{index}]" for index in location[1:] if isinstance(index, int))]
    )


def _allowed(error: Any, hint: Any) -> str:
    kind: str = error["type"]
    if kind.startswith(("greater_than", "less_than", "finite")):
        bounds = _bounds(hint)
        if bounds.get("le") == LARGEST_COUNT and kind != "less_than_equal":
            del bounds["le"]  # no realistic value reaches it
        return _range(bounds)
    if kind in ("is_instance_of", "dataclass_exact_type"):
        name = error["ctx"].get("class") or error["ctx"]["class_name"]
        return _CLASSES.get(name, f"a {name}")
    return _KINDS.get(kind) or error["msg"].lower().removeprefix("input should be ").removeprefix(
        "a valid "
    )


def _bounds(hint: Any) -> dict[str, float]:
    """Return the bounds that a type declares anywhere inside, by their names: gt, ge, lt, le."""
    marks = [
        mark
        for field in getattr(hint, "__metadata__", ())
        for mark in getattr(field, "metadata", [field])
    ]
    bounds = {
        side: getattr(mark, side)
        for mark in marks
        for side in ("gt", "ge", "lt", "le")
        if hasattr(mark, side)
    }
    return bounds | {
        side: bound for inner in get_args(hint) for side, bound in _bounds(inner).items()
    }


def _range(bounds: Mapping[str, float]) -> str:
    low = bounds.get("gt", bounds.get("ge"))
    high = bounds.get("lt", bounds.get("le"))
    below = ""
    above = ""
    if high is not None:
        below = f"less than {high:g}" if "lt" in bounds else f"at most {high:g}"
    if low is not None:
        above = f"greater than {low:g}" if "gt" in bounds else f"at least {low:g}"
    if not below or not above or high == LARGEST:
        return " and ".join(filter(None, (above, below)))
    if "ge" in bounds and "le" in bounds:
        return f"between {low:g} and {high:g}"
    return f"in {'(' if 'gt' in bounds else '['}{low:g}, {high:g}{')' if 'lt' in bounds else ']'}"
