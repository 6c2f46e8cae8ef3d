"""Read configurations: a TOML file or a table, changed by `key=value`, and checked."""

import re
import tomllib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from fedloom.algorithm.method import components
from fedloom.common.errors import (
    LONGEST_QUOTED,
    FedloomError,
    InvalidValue,
    one_line,
    quoted,
    shortened,
)
from fedloom.common.expression import DEEPEST, Call, parse, parse_value, show
from fedloom.common.fields import (
    parameters,
    require_plain,
    type_hints,
)
from fedloom.common.training import Training
from fedloom.parts.building import build
from fedloom.rounds.clock import Clock
from fedloom.rounds.schedule import NEUTRAL, Schedule, Stop
from fedloom.runs.config_check import require_known
from fedloom.runs.configuration import Configuration, Data
from fedloom.runs.entry import OWN_KEYS, Own, full_keys, own_key, own_settings
from fedloom.runs.settings import combinations, label, require_key, with_changes

_Kind = TypeVar("_Kind", bound=Hashable)


def load(path: Path, overrides: Sequence[str] = ()) -> Configuration:
    """Read and check a configuration file with `key=value` overrides. Raise `InvalidValue` or
    `UnknownName`.

    Args:
        path: A TOML file.
        overrides: Values that replace values of the file, such as `training.epochs=5`.

    Returns:
        The configuration, with defaults for missing keys.
    """
    return configuration(read_table(path, overrides))


def read_table(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a file and `key=value` overrides as a table that is not checked yet. Raises as
    `load`.

    Args:
        path: A TOML file.
        overrides: Values that replace values of the file, such as `training.epochs=5`.

    Returns:
        The nested table. Without a name in the file, its name is the file's.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise InvalidValue(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}"
        ) from None
    if len(content) > LONGEST_FILE:
        raise InvalidValue(f"{path} is longer than {LONGEST_FILE:,} bytes: no configuration is")
    try:
        table = tomllib.loads(content.decode())
    except RecursionError:
        raise InvalidValue(f"{path} nests more than {DEEPEST} levels deep") from None
    except ValueError as error:
        raise InvalidValue(
            f"{path} is not a TOML file: {one_line(str(error), LONGEST_QUOTED)}"
        ) from None
    _require_plain_values(table)
    table.setdefault("name", path.stem)
    for override in overrides:
        put(table, override)
    return table


def configuration(table: Mapping[str, Any]) -> Configuration:
    """Return the checked configuration of a table of plain values. Raises as `load`."""
    _require_plain_values(table)
    values = {key: value for key, value in table.items() if key not in ("settings", "methods")}
    own: dict[str, Own] = {}
    if "methods" in table:
        values["algorithms"], own = _methods(table)
    for name, kind in _SECTIONS.items():
        values[name] = _read(kind, values.get(name, {}), name)
    base = replace(_read(Configuration, values), own=own)
    require_known(base)
    for name in base.own:
        try:
            base.of(name)
        except InvalidValue as error:
            raise InvalidValue(f"methods, {name}: {error}") from None
    if "settings" not in table:
        return base
    variants = {}
    for changes in combinations(table["settings"], VARYING):
        require_not_own(changes, base.own, "settings")
        try:
            variant = configuration(with_changes({**table, "settings": {}}, changes))
        except FedloomError as error:
            raise InvalidValue(f"settings, {label(changes)}: {error}") from None
        variants[label(changes)] = replace(variant, changes=changes)
    return replace(base, variants=variants)


def _methods(table: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Own]]:
    """Return the expressions and the settings of the tables `[[methods]]` by label."""
    if table.get("algorithms"):
        raise InvalidValue("the methods are given twice: give algorithms or [[methods]], not both")
    if not isinstance(table["methods"], list):
        raise InvalidValue(
            f"methods must be tables [[methods]], each with an algorithm, not "
            f"{quoted(table['methods'], show)}"
        )
    algorithms: dict[str, str] = {}
    own: dict[str, Own] = {}
    for number, entry in enumerate(table["methods"], start=1):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("algorithm"), str):
            raise InvalidValue(
                f"[[methods]] number {number} needs an algorithm, such as algorithm = 'fedavg', "
                f"not {quoted(entry, show)}"
            )
        for key in entry:
            require_key(key, ("algorithm", "label", *OWN_KEYS), "methods.")
        name = str(entry.get("label", entry["algorithm"]))
        if name in algorithms:
            raise InvalidValue(f"methods lists {quoted(name)} twice: give each a label of its own")
        settings = {k: v for k, v in entry.items() if k not in ("algorithm", "label")}
        algorithms[name] = entry["algorithm"]
        own[name] = own_settings(settings, f"methods, {name}: ")
    return algorithms, {name: settings for name, settings in own.items() if settings}


def require_not_own(keys: Iterable[str], own: Mapping[str, Own], purpose: str) -> None:
    """Raise `InvalidValue` for a key with several values that a method sets itself.

    Args:
        keys: Keys with several values, such as `training.learning_rate`.
        own: Settings of each method, by its name.
        purpose: Table of the keys, with which the error begins, such as `settings`.
    """
    for key in keys:
        for name, settings in own.items():
            if own_key(key) in settings:
                raise InvalidValue(
                    f"{purpose}.{key}: the method {quoted(name)} sets {own_key(key)} itself: "
                    "remove one of them"
                )


def single_method(
    table: Mapping[str, Any], checked: Configuration, name: str, own: Own
) -> dict[str, Any]:
    """Return the table of one method, with its own settings in place of those of all methods.

    Args:
        table: The table of a configuration.
        checked: The configuration.
        name: One of its methods.
        own: Its settings.

    Returns:
        A new table with the key `algorithm` in place of a list of methods.
    """
    others = {key: value for key, value in table.items() if key not in ("methods", "algorithms")}
    algorithm = str(checked.method(name))
    return with_changes({**others, "algorithm": algorithm}, full_keys(own))


def _require_plain_values(table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        require_plain(value, key if key in KEYS else quoted(key))


_SECTIONS: dict[str, type] = {"data": Data, "training": Training, "clock": Clock, "stop": Stop}


_IN_SECTIONS = [
    f"{section}.{entry.name}" for section, kind in _SECTIONS.items() for entry in fields(kind)
]


KEYS = [
    *(
        entry.name
        for entry in fields(Configuration)
        if entry.name not in ("variants", "changes", "own", "tuned", "objects")
    ),
    "settings",
    "methods",
    *_IN_SECTIONS,
]
"""Every key that a file may hold, with its table."""


VARYING = [
    *(
        entry.name
        for entry in fields(Schedule)
        if entry.name not in ("seed", "clock", "stop", *NEUTRAL)
    ),
    "model",
    "engine",
    *_IN_SECTIONS,
]
"""The keys that settings may vary: those that figures depend on, except the method and the seed."""


def _read(kind: type[_Kind], table: object, section: str = "") -> _Kind:
    """Return the dataclass of a table. TOML has no null: 'none' stands for it where it is
    allowed.
    """
    prefix = section and f"{section}."
    if not isinstance(table, Mapping):
        names = ", ".join(key.removeprefix(prefix) for key in KEYS if key.startswith(prefix))
        raise InvalidValue(
            f"{section} must be a table with the keys {names}, not {quoted(table, show)}"
        )
    for key in table:
        if kind is Configuration and key not in KEYS:
            _require_no_parameter(key, table)
        require_key(prefix + key, KEYS)
    hints = type_hints(kind)
    try:
        return kind(
            **{
                k: None if v == "none" and type(None) in get_args(hints[k]) else v
                for k, v in table.items()
            }
        )
    except InvalidValue as error:
        empty = [k for k, v in table.items() if v == "none" and str(error).startswith(f"{k} must")]
        hint = f": write {empty[0]}=[] for none" if empty and "a list" in str(error) else ""
        raise InvalidValue(f"{prefix}{error}{hint}") from None


def _require_no_parameter(key: str, table: Mapping[str, Any]) -> None:
    """Raise `InvalidValue`, with the right form, for a parameter of the method as a key."""
    try:
        method = build(str(table.get("algorithm")))
    except FedloomError:
        return
    for component in components(method):
        if key in parameters(type(component)):
            setattr(component, key, table[key])
            form = quoted(str(method))
            raise InvalidValue(f"{key} is a parameter of the method: write algorithm={form}")


LONGEST_FILE = 4 << 20
"""Bytes of a configuration file, at most."""


def put(
    table: dict[str, Any], text: str, example: str = "rounds=50 or training.learning_rate=0.1"
) -> None:
    """Put `key=value` into the table; tables on the way are made. Raises `InvalidValue`, with the
    `example`, otherwise.

    Args:
        table: The nested table. It is changed.
        text: Key and value. A value that is not TOML is text.
        example: Example for errors.
    """
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\s*[\w-]+(\.[\w-]+)*\s*", key):
        raise InvalidValue(f"{quoted(text)} is not key=value, such as {example}")
    if key.count(".") >= DEEPEST:
        raise InvalidValue(f"{quoted(key)} nests more than {DEEPEST} levels deep")
    parsed = _value(value.strip())
    require_plain(parsed, shortened(key.strip()))
    table.update(with_changes(table, {key.strip(): parsed}))


def _value(text: str) -> Any:
    """Read a value as TOML writes it; anything else is text, inside lists and inline tables too."""
    with suppress(ValueError, RecursionError):
        table = tomllib.loads(f"value = {text}")
        if len(table) == 1:
            return table["value"]
    with suppress(InvalidValue):
        if text.startswith("[") and text.endswith("]"):
            return _as_written(parse_value(text))
        if text.startswith("{") and text.endswith("}"):
            return {
                name: _as_written(item)
                for name, item in parse(f"table({text[1:-1]})").named.items()
            }
    return text


def _as_written(value: Any) -> Any:
    """Turn calls and none back into text, inside lists too: TOML has neither."""
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    return show(value) if value is None or isinstance(value, Call) else value
