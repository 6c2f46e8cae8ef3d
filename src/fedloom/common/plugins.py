"""The user's modules, imported by their path, also from the current directory.

A plugin is a module that registers methods, models, data sets, partitions, recorders or trackers
when it is imported. The plugins in `FEDLOOM_PLUGINS` (separated by commas) are imported before the
first lookup in a registry, in every process.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType
from typing import Any

from fedloom.common.errors import LONGEST_QUOTED, InvalidValue, one_line, quoted, suggestion

VARIABLE = "FEDLOOM_PLUGINS"
"""Environment variable with the modules that every process imports."""


def import_plugins(names: Iterable[str], key: str = "plugins") -> None:
    """Import the modules. Repeated calls have no effect.

    Args:
        names: Dotted names of modules.
        key: Name of the setting, for errors.

    Raises:
        InvalidValue: A module cannot be imported; the text is one line.
    """
    for name in names:
        _imported(name, key)


def import_from_environment() -> None:
    """Import the modules named in `FEDLOOM_PLUGINS`. Raises as `import_plugins`."""
    for name in filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))):
        _imported(name, VARIABLE, own=True)


def found_at(path: str, key: str, allowed: str = "'package.module:name'") -> Callable[..., Any]:
    """Return the function or class at `package.module:name`.

    Args:
        path: The path.
        key: Name of the setting, for errors.
        allowed: Allowed form of the path, for errors.

    Returns:
        The function or class, unchanged.

    Raises:
        InvalidValue: The module cannot be imported, or has no such function or class.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise InvalidValue(f"{key} {quoted(path)} must be {allowed}")
    key = f"{key} {quoted(path)}"
    module = _imported(module_name, key)
    try:
        make = attrgetter(attribute)(module)
    except AttributeError:
        near = suggestion(attribute, [name for name in vars(module) if not name.startswith("_")])
        raise InvalidValue(
            f"{key}: module {quoted(module_name)} has no {quoted(attribute)}{near}"
        ) from None
    if not callable(make):
        raise InvalidValue(
            f"{key}: {quoted(attribute)} must be a function or class, not {type(make).__name__}"
        )
    return make  # type: ignore[no-any-return]


@contextmanager
def refused_code() -> Iterator[None]:
    """Refuse to import the user's modules in this block: naming one raises `InvalidValue`."""
    global _refuses
    previous = _refuses
    _refuses = True
    try:
        yield
    finally:
        _refuses = previous


_refuses = False


def _imported(name: str, key: str, own: bool = False) -> ModuleType:
    """Return the module.

    `own` is True if this machine's user names it; then it is imported although code is refused.
    """
    if _refuses and not own:
        raise InvalidValue(
            f"{key}: {quoted(name)} is not part of fedloom, and other code is not trusted here"
        )
    if "/" in name or name.endswith(".py"):
        module = name.removesuffix(".py").replace("/", ".").strip(".")
        raise InvalidValue(
            f"{key}: {quoted(name)} is a file: give the name of the module, such as "
            f"{quoted(module)}"
        )
    if not {"", os.getcwd()} & set(sys.path):
        # stays: worker processes and unpickling import it again
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's file may raise any error
        reason = one_line(f"{type(error).__name__}: {error}", LONGEST_QUOTED)
        raise InvalidValue(f"{key}: cannot import {quoted(name)}: {reason}") from error
