"""Settings: configuration keys with several values each, as a list or a range, and all their
combinations.

[settings]
data.partition = ["dirichlet(0.1)", "iid"]
participation = { from = 0.1, to = 0.5, steps = 3 }
"""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from pydantic import Field

from fedloom.common.errors import InvalidValue, nearest, quoted, shortened
from fedloom.common.expression import show
from fedloom.common.fields import Finite, checked

Changes = dict[str, Any]
"""One setting: full keys with the value of each, such as `{"training.epochs": 5}`."""

_Range = TypedDict(
    "_Range",
    {
        "from": int | Finite,
        "to": int | Finite,
        "steps": Annotated[int, Field(ge=2, le=10_000)],
        "scale": Literal["linear", "log"],
    },
)

MOST_COMBINATIONS = 10_000
"""Settings of one configuration, and trials of one search, at most."""

_EXAMPLE = "a list such as [1, 5] or a range such as {from = 0.1, to = 0.5, steps = 3}"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, evenly spaced or evenly in their logarithm. Without `steps`:
    all between.
    """

    low: float
    high: float
    steps: int | None = None
    logarithmic: bool = False

    @property
    def integral(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def values(self) -> list[float]:
        """Return the `steps` values, as whole numbers if all of them are, and 0.3 instead of
        0.30000000000000004.
        """
        assert self.steps is not None
        spread = np.geomspace if self.logarithmic else np.linspace
        values = [float(f"{value:.12g}") for value in spread(self.low, self.high, self.steps)]
        if self.integral and all(map(float.is_integer, values)):
            return list(map(int, values))
        return values


Axis = list[Any] | Range
"""The values of one key: a list, or a range."""


def read_axes(
    table: object, keys: Sequence[str], prefix: str = "", *, steps_needed: bool = True
) -> dict[str, Axis]:
    """Return the keys of a nested table with their values. Raise `InvalidValue` for other keys than
    `keys`.

    Args:
        table: The nested table.
        keys: Allowed keys, in full, such as `training.epochs`.
        prefix: Name of the table with a full stop, for errors.
        steps_needed: A range must have a number of steps.

    Returns:
        A list or a range for each full key, in the order of the table.
    """
    if not isinstance(table, Mapping):
        raise InvalidValue(
            f"{prefix.rstrip('.')} must be a table of keys, each with {_EXAMPLE}, not "
            f"{quoted(table, show)}"
        )
    return {
        key: _axis(value, prefix + key, steps_needed)
        for key, value in _leaves(table, "", keys, prefix)
    }


def combinations(table: object, keys: Sequence[str]) -> list[Changes]:
    """Return every setting of a `[settings]` table in the order of its lists; the last key changes
    fastest.

    Args:
        table: The table, with a list or a range for each key.
        keys: Allowed keys, in full, such as `training.epochs`.

    Returns:
        The values by full key, for each setting; empty without keys.
    """
    axes = read_axes(table, keys, "settings.")
    return products({key: values_of(axis) for key, axis in axes.items()}) if axes else []


def products(lists: Mapping[str, Sequence[Any]]) -> list[Changes]:
    """Return every combination of the values of keys. Raise `InvalidValue` for more than
    `MOST_COMBINATIONS`.
    """
    count = math.prod(map(len, lists.values()))
    if count > MOST_COMBINATIONS:
        sizes = " x ".join(str(len(values)) for values in lists.values())
        raise InvalidValue(
            f"{sizes} values have {count:,} combinations: at most {MOST_COMBINATIONS:,} are allowed"
        )
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def values_of(axis: Axis) -> list[Any]:
    """Return all values of a list, or of a range with steps."""
    return axis.values() if isinstance(axis, Range) else axis


def label(changes: Mapping[str, Any]) -> str:
    """Return a setting as users type it, such as `data.partition=iid, training.epochs=5`, or ""."""
    return ", ".join(f"{key}={plain_text(value)}" for key, value in changes.items())


def plain_text(value: Any) -> str:
    """Return a value as users type it behind `key=` on the command line."""
    if isinstance(value, list):
        return f"[{', '.join(map(plain_text, value))}]"
    return value if isinstance(value, str) else show(value)


def with_changes(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested table with some values set. Raise `InvalidValue` where a value is
    in the way.

    Args:
        table: The nested table. It stays unchanged.
        changes: Values by full key, such as `training.epochs`. Missing tables are created.

    Returns:
        The changed copy.
    """
    result = copy.deepcopy(dict(table))
    for key, value in changes.items():
        *tables, name_in_table = key.split(".")
        inner = result
        for depth, name in enumerate(tables, start=1):
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise InvalidValue(
                    f"{quoted(key)} cannot be set: {quoted('.'.join(tables[:depth]))} is no table"
                )
        inner[name_in_table] = value
    return result


def require_key(key: str, keys: Sequence[str], prefix: str = "") -> None:
    """Raise `InvalidValue` unless the full key is one of `keys`; it names the nearest, by the key
    or by its last word.

    Args:
        key: The key.
        keys: Allowed keys, in full, such as `training.epochs`.
        prefix: Name of the table with a full stop, for errors.
    """
    if key not in keys:
        words = {full.rpartition(".")[2]: full for full in reversed(keys)}
        word = key.rpartition(".")[2]
        near = (
            words.get(nearest(word, words, 1.0))
            or nearest(key, keys, 0.8)
            or words.get(nearest(word, words))
        )
        hint = f"did you mean '{prefix}{near}'?" if near else f"there are {', '.join(keys)}"
        raise InvalidValue(f"unknown key {quoted(prefix + key)}: {hint}")


def _leaves(
    table: Mapping[str, Any], outer: str, keys: Sequence[str], prefix: str
) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = outer + name
        is_table = any(full.startswith(f"{key}.") for full in keys)
        if isinstance(value, Mapping) and (
            is_table or (key in keys and not value.keys() & _Range.__annotations__.keys())
        ):
            yield from _leaves(value, f"{key}.", keys, prefix)
        else:
            if not any(key.startswith(f"{full}.") and full.endswith("_options") for full in keys):
                require_key(key, keys, prefix)
            yield key, value


def _axis(value: Any, key: str, steps_needed: bool) -> Axis:
    if isinstance(value, Range):
        return value
    if isinstance(value, Mapping):
        return _range(value, key, steps_needed)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple | range):
        raise InvalidValue(f"{key} must be {_EXAMPLE}, not {quoted(value, show)}")
    if not value:
        raise InvalidValue(f"{key} lists no value: give {_EXAMPLE}")
    ((text, count),) = Counter(map(plain_text, value)).most_common(1)
    if count > 1:
        raise InvalidValue(f"{key} lists {shortened(text)} twice")
    return list(value)


def _range(table: Mapping[str, Any], key: str, steps_needed: bool) -> Range:
    for name in table:
        require_key(name, list(_Range.__annotations__), f"{key}.")
    missing = [
        name for name in ("from", "to", *(["steps"] if steps_needed else [])) if name not in table
    ]
    if missing:
        raise InvalidValue(f"{key} lacks {' and '.join(missing)}: give {_EXAMPLE}")
    options = checked(_Range, table, f"{key}.")
    low = options["from"]
    high = options["to"]
    logarithmic = options.get("scale") == "log"
    if not low < high:
        raise InvalidValue(
            f"{key} must go from a smaller number to a larger one, not from {low} to {high}"
        )
    if logarithmic and low <= 0:
        raise InvalidValue(
            f"{key}.from of a range with scale = 'log' must be greater than 0, not {low}"
        )
    return Range(low, high, options.get("steps"), logarithmic)
