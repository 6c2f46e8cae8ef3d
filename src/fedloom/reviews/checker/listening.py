"""Listeners for actions of a method that no figure shows: writes in place, draws, reads of the
server's state, closures.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedloom.reviews.checker.findings import Finding, calling_location, drawing_location
from fedloom.state.store import ClientStore, Memory

DRAWS = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "multinomial", "normal", "poisson", "dropout", "normal_", "uniform_", "bernoulli_", "random_",
    "exponential_", "cauchy_", "log_normal_", "geometric_",
})  # fmt: skip
"""Functions of PyTorch that draw from its global generator unless they are given another."""


UNINITIALIZED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "resize_"})
"""Functions of PyTorch that return whatever the memory contains, perhaps NaN."""

MISTAKES = {
    "changed": ("changes {0} in place", "put a new tensor in its place, such as {0} + update"),
    "drawn": (
        "draws from {0}",
        "draw from round.stream('...') on the server, cohort.stream('...') on clients",
    ),
    "read": (
        "the client half reads self.state[{0!r}], which is not there on worker processes and sites",
        "send it: another tensor in the message of send",
    ),
    "stored": (
        "the client half writes self.state[{0!r}], which is lost on worker processes and sites",
        "what the server is to know goes into the reply, under a name that expects gives; a "
        "client's own into cohort.memory",
    ),
    "written": (
        "the client half writes self.{0}, which worker processes and sites forget",
        "a client remembers in cohort.memory[{0!r}]",
    ),
    "lost": (
        "changes what cohort.memory.get({0!r}) gave in place, and never stores it",
        "store it: cohort.memory[{0!r}] = rows",
    ),
}
"""Problems that a listener notes, and their remedies. The braces take a name."""


class Listener(TorchFunctionMode):
    """Notes changes of watched tensors, draws, and the other `MISTAKES` that are reported to it."""

    def __init__(self) -> None:
        super().__init__()
        # by name, the line that did it first
        self.notes: dict[str, dict[str, str]] = {kind: {} for kind in MISTAKES}
        self.faults: list[Finding] = []
        self.nan_location = ""  # the first line of a method that made NaN
        self._watched: dict[str, tuple[Tensor, int]] = {}

    def note(self, kind: str, name: str, location: str) -> None:
        self.notes[kind].setdefault(name, location)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        name = getattr(func, "__name__", "")
        if name in DRAWS and options.get("generator") is None and (location := drawing_location()):
            self.note("drawn", f"torch's global generator ({name})", location)
        self._look()
        if not self.nan_location and name not in UNINITIALIZED:
            arguments = (*args, *options.values())
            if _has_nan(result) and not any(map(_has_nan, arguments)):
                self.nan_location = calling_location()
        return result

    def watch(self, tensors: Mapping[str, Tensor]) -> None:
        """Watch these tensors beside the others; a change counts for the one that was watched
        last.
        """
        self._watched = {
            **{name: (tensor, tensor._version) for name, tensor in tensors.items()},
            **self._watched,
        }

    def unwatch(self, names: Sequence[str]) -> None:
        """Stop watching these."""
        self._look()
        for name in names:
            self._watched.pop(name, None)

    def _look(self) -> None:
        changed = [
            name for name, (tensor, version) in self._watched.items() if tensor._version != version
        ]
        if changed:
            self.note("changed", changed[0], calling_location())
            self._watched.update(
                {
                    name: (self._watched[name][0], self._watched[name][0]._version)
                    for name in changed
                }
            )

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each note."""
        for kind, (problem, remedy) in MISTAKES.items():
            for name, location in self.notes[kind].items():
                yield Finding(problem.format(name), location, remedy.format(name))
        yield from self.faults


def _has_nan(value: Any) -> bool:
    try:
        return isinstance(value, Tensor) and bool(value.isnan().any())
    except RuntimeError:  # a tensor without values, inside vmap or on the device "meta"
        return False


class GuardedState(dict[str, Tensor]):
    """A state that notes which of its tensors are read, and where: a client half must not."""

    def __init__(self, state: Mapping[str, Tensor], listener: Listener) -> None:
        super().__init__(state)
        self._listener = listener

    def __getitem__(self, name: str) -> Tensor:
        self._listener.note("read", name, calling_location())
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._listener.note("read", name, calling_location())
        return super().get(name, default)

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._listener.note("stored", name, calling_location())
        super().__setitem__(name, value)


class ListeningMemory(Memory):
    """A memory that notes tensors that were read from it and changed in place, but not stored."""

    def __init__(self, store: ClientStore, clients: Sequence[int]) -> None:
        super().__init__(store, clients)
        self._read: dict[str, tuple[Tensor, int, str]] = {}
        self._stored: set[str] = set()

    def get(self, name: str, default: Tensor) -> Tensor:
        rows = super().get(name, default)
        self._read.setdefault(name, (rows, rows._version, calling_location()))
        return rows

    def __setitem__(self, name: str, rows: Tensor) -> None:
        self._stored.add(name)
        super().__setitem__(name, rows)

    def write(self, name: str, rows: Tensor, clients: Tensor) -> None:
        self._stored.add(name)
        super().write(name, rows, clients)

    def lost(self) -> dict[str, str]:
        """Return the names of tensors that were changed in place and not stored, with the lines
        that read them.
        """
        return {
            name: location
            for name, (rows, version, location) in self._read.items()
            if name not in self._stored and rows._version != version
        }
