"""What a method does while it trains that leaves no trace in a run's figures: writes in place, draws, reads, closures."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedloom.errors import code_place
from fedloom.experiment.findings import Finding, calling_place, drawing_place
from fedloom.local.cohort import Cohort, Trained
from fedloom.state.store import ClientStore, Memory

DRAWS = frozenset(
    (
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial",
        "normal", "poisson", "dropout", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_",
        "log_normal_", "geometric_",
    )
)  # fmt: skip
"""Functions of PyTorch that draw from its global generator unless they are given another."""


class Listener(TorchFunctionMode):
    """Notes, while it is on, what is done to the tensors that it watches and what is drawn; and what it is told beside.

    Each is kept by name with the line that did it first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[str, str] = {}  # in place
        self.drawn: dict[str, str] = {}
        self.read: dict[str, str] = {}  # of the server's state, by a client
        self.written: dict[str, str] = {}  # to the method, by a client
        self.lost: dict[str, str] = {}  # of what a client remembers: changed in place and not stored
        self.enclosed: dict[str, str] = {}  # tensors of clients that a function reads from around it
        self.faults: list[Finding] = []
        self._watched: dict[str, tuple[Tensor, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        if name in DRAWS and given.get("generator") is None and (place := drawing_place()):
            self.drawn.setdefault(f"torch's global generator ({name})", place)
        self._look()
        return result

    def watch(self, tensors: Mapping[str, Tensor]) -> None:
        """Watch these tensors beside the others; a change counts for the one that was watched last."""
        self._watched = {**{name: (tensor, tensor._version) for name, tensor in tensors.items()}, **self._watched}

    def unwatch(self, names: Sequence[str]) -> None:
        """Watch these no more."""
        for name in names:
            self._watched.pop(name, None)

    def _look(self) -> None:
        changed = [name for name, (tensor, version) in self._watched.items() if tensor._version != version]
        if changed:
            self.changed.setdefault(changed[0], calling_place())
            self._watched.update({name: (self._watched[name][0], self._watched[name][0]._version) for name in changed})

    def guarded(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state as a client half must not read it: whoever does is noted."""
        return _GuardedState(state, self.read)

    def findings(self) -> Iterator[Finding]:
        """What was noted."""
        for name, place in self.changed.items():
            yield Finding(f"changes {name} in place", place, f"put a new tensor in its place, such as {name} + update")
        for what, place in self.drawn.items():
            yield draws(what, place)
        for name, place in self.read.items():
            yield Finding(
                f"the client half reads self.state[{name!r}], which is not there on worker processes and sites",
                place,
                "send it: another tensor in the message of send",
            )
        for name, place in self.written.items():
            yield Finding(
                f"the client half writes self.{name}, which worker processes and sites forget",
                place,
                f"a client remembers in cohort.memory[{name!r}]",
            )
        for name, place in self.lost.items():
            yield Finding(
                f"changes what cohort.memory.get({name!r}) gave in place, and never stores it",
                place,
                f"store it: cohort.memory[{name!r}] = rows",
            )
        for name, place in self.enclosed.items():
            yield Finding(
                f"reads {name} of all clients from around it, though a step may be one of some clients alone",
                place,
                f"pass it as context={{...}} to cohort.fit and read it there, or in each_batch's state ({name})",
            )
        yield from self.faults


class _GuardedState(dict[str, Tensor]):
    """A state that notes which of its tensors are read, and where."""

    def __init__(self, state: Mapping[str, Tensor], read: dict[str, str]) -> None:
        super().__init__(state)
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        self._read.setdefault(name, calling_place())
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.setdefault(name, calling_place())
        return super().get(name, default)


class ListeningCohort(Cohort):
    """A cohort that notes functions which read clients' tensors from around them."""

    listener: Listener

    def fit(self, start: Tensor, **named: Any) -> Trained:
        self._note(named.values())
        return super().fit(start, **named)

    def each_batch(self, step: Any, state: dict[str, Tensor], **named: Any) -> Tensor:
        self._note([step])
        return super().each_batch(step, state, **named)

    def _note(self, functions: Any) -> None:
        for function in functions:
            for name in enclosed(function, len(self.clients)) if callable(function) else ():
                self.listener.enclosed.setdefault(name, code_place(_unwrapped(function)) or calling_place())

    @classmethod
    def of(cls, cohort: Cohort, listener: Listener) -> ListeningCohort:
        """The same cohort, listened to."""
        found = copy.copy(cohort)
        found.__class__ = cls
        assert isinstance(found, ListeningCohort)
        found.listener = listener
        return found


def enclosed(function: Callable[..., Any], clients: int) -> list[str]:
    """The names under which a function holds tensors with a row for each of several clients, or a whole inbox."""
    held: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        held = {**{f"argument {k + 1}": value for k, value in enumerate(function.args)}, **function.keywords}
    plain = _unwrapped(function)
    closure = getattr(plain, "__closure__", None) or ()
    for name, cell in zip(plain.__code__.co_freevars if closure else (), closure, strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # assigned later
            continue
    return [name for name, value in held.items() if _is_of_clients(value, clients)]


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _is_of_clients(value: Any, clients: int) -> bool:
    if isinstance(value, Mapping):
        return any(isinstance(one, Tensor) for one in value.values())
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == clients > 1


class ListeningMemory(Memory):
    """A memory that tells what was read from it and changed in place, but not stored."""

    def __init__(self, store: ClientStore, clients: Sequence[int]) -> None:
        super().__init__(store, clients)
        self._given: dict[str, tuple[Tensor, int, str]] = {}
        self._stored: set[str] = set()

    def get(self, name: str, default: Tensor) -> Tensor:
        rows = super().get(name, default)
        self._given.setdefault(name, (rows, rows._version, calling_place()))
        return rows

    def __setitem__(self, name: str, rows: Tensor) -> None:
        self._stored.add(name)
        super().__setitem__(name, rows)

    def write(self, name: str, rows: Tensor, clients: Tensor) -> None:
        self._stored.add(name)
        super().write(name, rows, clients)

    def lost(self) -> dict[str, str]:
        """The names of what was changed in place and not stored, with the lines that read it."""
        return {
            name: place
            for name, (rows, version, place) in self._given.items()
            if name not in self._stored and rows._version != version
        }


def draws(what: str, place: str) -> Finding:
    """The finding that a method draws from a generator which is not its own."""
    return Finding(
        f"draws from {what}", place, "draw from round.stream('...') on the server, cohort.stream('...') on clients"
    )
