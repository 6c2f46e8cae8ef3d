"""Named things of one kind (models, data sets, partitions, algorithms), found without a list to keep.

A thing registers itself with a decorator in its own file. The registry imports every module of one package on first use,
so a new file is a new entry in the documentation and every configuration. `docs/generate/listings.py` makes the lists of the
command line of what is registered.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from fedloom.config.expression import Call, parse, plain
from fedloom.config.fields import checked, parameters
from fedloom.config.plugins import import_from_environment
from fedloom.errors import InvalidValue, UnknownName, quoted, suggestion

T = TypeVar("T", bound=Callable[..., Any])
Registered = TypeVar("Registered", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered thing: its name, the callable that makes it, and the parameters a user may set."""

    name: str
    make: T

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.make) or "").split("\n")[0]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What a user may set."""
        return parameters(self.make)

    def options(self, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """`positional` and `named` arguments as one dictionary of parameters.

        Raises `InvalidValue` for too many positional arguments, an unknown name (with the nearest) or one given twice.
        """
        names = list(self.parameters)
        if len(positional) > len(names):
            raise InvalidValue(
                f"{self.name} takes at most {len(names)} arguments ({', '.join(names)}), not {len(positional)}"
            )
        given = dict(zip(names, positional, strict=False))
        for name, value in named.items():
            if name not in names:
                allowed = ", ".join(names) or "none"
                raise InvalidValue(
                    f"{self.name} has no parameter {quoted(name)}{suggestion(name, names)} (it has: {allowed})"
                )
            if name in given:
                raise InvalidValue(f"{self.name} got {quoted(name)} twice")
            given[name] = value
        return given


class Registry(Generic[T]):
    """All things of one `kind`, defined in the modules of `package`.

    `argument` turns an argument of an expression into a value, given what is made and the parameter's name.
    """

    def __init__(
        self, kind: str, package: str, argument: Callable[[T, str, Any], Any] = lambda make, name, value: plain(value)
    ) -> None:
        self.kind = kind
        self.package = package
        self.argument = argument
        self._entries: dict[str, Entry[T]] = {}
        self._imported = False

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Decorator: file the function or class under `name`. For type checkers it stays what it is."""

        def add(make: Registered) -> Registered:
            known = self._entries.get(name)
            if known is not None and known.make is not make:
                raise InvalidValue(f"two {self.kind}s are named {name!r}")
            self._entries[name] = Entry(name, cast(T, make))
            return make

        return add

    def __getitem__(self, name: str) -> Entry[T]:
        """The entry called `name`; raises `UnknownName` with the nearest one."""
        self._import_all()
        if name not in self._entries:
            raise UnknownName(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._import_all()
        return name in self._entries

    def __iter__(self) -> Iterator[Entry[T]]:
        """All entries by name, without those that are known by their path alone, `module:Class`."""
        self._import_all()
        return iter(sorted((one for one in self._entries.values() if ":" not in one.name), key=lambda one: one.name))

    def of(self, make: object) -> Entry[T] | None:
        """The entry that makes this; None where it is not registered."""
        self._import_all()
        return next((entry for entry in self._entries.values() if entry.make is make), None)

    def build(self, expression: str | Call, *data: Any) -> Any:
        """What an expression such as `dirichlet(0.1)` names, made with `data` before its options. Raises as `read`."""
        entry, options = self.read(expression)
        return entry.make(*data, **options)

    def build_unless_none(self, expression: str) -> Any:
        """As `build`, with None for the expression `none`."""
        return None if expression.strip().lower() == "none" else self.build(expression)

    def read(self, expression: str | Call) -> tuple[Entry[T], dict[str, Any]]:
        """The entry that an expression names, and its options, of which those without a default are all there.

        Raises `UnknownName` or `InvalidValue`, in one line, for whatever does not fit.
        """
        call = parse(expression) if isinstance(expression, str) else expression
        entry = self[call.name]
        if call.until is not None:
            raise InvalidValue(f"{quoted(call, str)}: nothing may follow here, but :{quoted(call.until, str)} does")
        given = entry.options(call.positional, call.named)
        values = {name: self.argument(entry.make, name, value) for name, value in given.items()}
        options = checked(entry.make, values, f"{entry.name}: ")
        missing = [name for name, p in entry.parameters.items() if p.default is p.empty and name not in options]
        if missing:
            raise InvalidValue(f"{entry.name} needs {', '.join(missing)}")
        return entry, options

    def _import_all(self) -> None:
        if self._imported:
            return
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__, f"{self.package}."):
            importlib.import_module(module.name)
        self._imported = True  # a plugin may look things up while it is imported
        try:
            import_from_environment()
        except InvalidValue:
            self._imported = False
            raise
