"""Registries of models, data sets, partitions, algorithms and others, by name.

A function or class registers itself with a decorator in its file. The registry imports every module
of one package on first use, so a new file is a new entry in the documentation and in every
configuration. `cli/catalog.py` makes the lists of the command line from the registries.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from fedloom.common.errors import InvalidValue, UnknownName, quoted, suggestion
from fedloom.common.expression import Call, parse, plain
from fedloom.common.fields import checked, parameters
from fedloom.common.plugins import import_from_environment

_SECTIONS = re.compile(r"^(Args|Returns|Raises):\n(?: .*\n|\n)*", re.MULTILINE)
"""Google style sections of a docstring: a title, and the indented or empty lines below it."""

T = TypeVar("T", bound=Callable[..., Any])
Registered = TypeVar("Registered", bound=Callable[..., Any])


def _docstring(make: Any) -> tuple[str, dict[str, str]]:
    """Return the docstring without its sections, and the descriptions in its Args section."""
    text = (inspect.getdoc(make) or "") + "\n"
    sections = "".join(match[0] for match in _SECTIONS.finditer(text) if match[1] == "Args")
    entries = re.findall(r"^    (\w+): (.+(?:\n     .+)*)", sections, re.MULTILINE)
    return _SECTIONS.sub("", text).strip(), {
        name: " ".join(words.split()) for name, words in entries
    }


@dataclass(frozen=True)
class RegistryEntry(Generic[T]):
    """A registered name and the callable that makes its object."""

    name: str
    make: T

    @property
    def text(self) -> str:
        """The docstring without its sections."""
        return _docstring(self.make)[0]

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join(self.text.partition("\n\n")[0].split())

    @property
    def arguments(self) -> dict[str, str]:
        """Description of each parameter; "" if it has none.

        It is in the Args section of the docstring or of a base class.
        """
        described: dict[str, str] = {}
        for base in self.make.__mro__ if inspect.isclass(self.make) else (self.make,):
            described = _docstring(base)[1] | described
        return {name: described.get(name, "") for name in self.parameters}

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that a user may set."""
        return parameters(self.make)

    def options(self, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by name.

        Args:
            positional: Arguments without a name.
            named: Arguments with a name.

        Returns:
            All arguments by name, not yet converted to their types.

        Raises:
            InvalidValue: There are too many arguments, or one is unknown or repeated.
        """
        names = list(self.parameters)
        allowed = ", ".join(names) or "none"
        if len(positional) > len(names):
            raise InvalidValue(
                f"{self.name} takes at most {len(names)} arguments ({allowed}), not "
                f"{len(positional)}"
            )
        options = dict(zip(names, positional, strict=False))
        for name in named:
            if name not in names:
                near = suggestion(name, names)
                raise InvalidValue(
                    f"{self.name} has no parameter {quoted(name)}{near} (it has: {allowed})"
                )
            if name in options:
                raise InvalidValue(f"{self.name} got {quoted(name)} twice")
        return options | named


class Registry(Generic[T]):
    """All entries of one kind.

    Args:
        kind: The noun of error messages, such as `data set`.
        packages: The packages with the modules that define the entries.
        argument: Turns an argument of an expression into a value: (make, name of the parameter,
            argument) -> value.
    """

    def __init__(
        self,
        kind: str,
        *packages: str,
        argument: Callable[[T, str, Any], Any] = lambda make, name, value: plain(value),
    ) -> None:
        self.kind = kind
        self.packages = packages
        self.argument = argument
        self._entries: dict[str, RegistryEntry[T]] = {}
        self._imported = False

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Return a decorator that registers a function or class unchanged under `name`."""

        def add(make: Registered) -> Registered:
            entry = self._entries.get(name)
            if entry is not None and entry.make is not make:
                raise InvalidValue(f"two {self.kind}s are named {name!r}")
            self._entries[name] = RegistryEntry(name, cast(T, make))
            return make

        return add

    def __getitem__(self, name: str) -> RegistryEntry[T]:
        """Return the entry called `name`; raise `UnknownName` with the most similar name."""
        self._import_all()
        if name not in self._entries:
            raise UnknownName(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._import_all()
        return name in self._entries

    def __iter__(self) -> Iterator[RegistryEntry[T]]:
        """Iterate over all entries by name, except those registered by a path, `module:Class`."""
        self._import_all()
        return iter(self._entries[name] for name in sorted(self._entries) if ":" not in name)

    def of(self, make: object) -> RegistryEntry[T] | None:
        """Return the entry of a function or class; None if it is not registered."""
        self._import_all()
        return next((entry for entry in self._entries.values() if entry.make is make), None)

    def build(self, expression: str | Call, *data: Any) -> Any:
        """Make the object of an expression such as `dirichlet(0.1)`.

        Args:
            expression: The expression.
            data: Arguments before the options.

        Returns:
            The object that the registered function or class returns.

        Raises:
            UnknownName: The name is not registered.
            InvalidValue: An option is not valid.
        """
        entry, options = self.read(expression)
        return entry.make(*data, **options)

    def build_unless_none(self, expression: str) -> Any:
        """Make the object of an expression; None for the expression `none`."""
        return None if expression.strip().lower() == "none" else self.build(expression)

    def read(self, expression: str | Call) -> tuple[RegistryEntry[T], dict[str, Any]]:
        """Return the entry of an expression and its checked options.

        Args:
            expression: Text such as `dirichlet(0.1)`, or its parsed form.

        Returns:
            The entry, and the options by name. Options without a value in the expression are
            absent.

        Raises:
            UnknownName: The name is not registered.
            InvalidValue: An option is not valid.
        """
        call = parse(expression) if isinstance(expression, str) else expression
        entry = self[call.name]
        if call.until is not None:
            raise InvalidValue(
                f"{quoted(call, str)}: :{quoted(call.until, str)} is not allowed here, remove it"
            )
        arguments = entry.options(call.positional, call.named)
        values = {name: self.argument(entry.make, name, value) for name, value in arguments.items()}
        options = checked(entry.make, values, f"{entry.name}: ")
        missing = [
            name
            for name, p in entry.parameters.items()
            if p.default is p.empty and name not in options
        ]
        if missing:
            raise InvalidValue(f"{entry.name} needs {', '.join(missing)}")
        return entry, options

    def _import_all(self) -> None:
        if self._imported:
            return
        for name in self.packages:
            package = importlib.import_module(name)
            for module in pkgutil.iter_modules(package.__path__, f"{name}."):
                importlib.import_module(module.name)
        self._imported = True  # a plugin may use the registry while it is imported

        try:
            import_from_environment()
        except InvalidValue:
            self._imported = False
            raise
