"""What engines share: their registry, client memory, integer buffers and the inspection of replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message
from fedloom.config.registry import Registry
from fedloom.data.partition import Partition
from fedloom.errors import InvalidValue, NotFinite, RefusedReply, code_place, in_brackets
from fedloom.local.cohort import Cohort, Trained
from fedloom.rounds.engine import INTEGERS, Engine
from fedloom.state.store import ClientStore
from fedloom.task import Task

# An engine is a class (task, *, options) that registers itself: @engines.register("rows").
engines: Registry[Callable[..., Any]] = Registry("engine", "fedloom.engines")


@dataclass(frozen=True)
class Choice:
    """Which engine was taken, and why where nobody named it: the rule's `reason`, or the seconds of a trial round in each, and
    when that was, where an earlier run made it."""

    name: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    kept_from: str = ""

    @property
    def named(self) -> bool:
        """Whether it was taken by its name."""
        return not self.reason and not self.seconds

    def __str__(self) -> str:
        measured = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.seconds.items())
        trial = f"trial round of an earlier run, {self.kept_from}" if self.kept_from else "trial round"
        return self.name if self.named else f"{self.name} ({self.reason or f'{trial}: {measured}'})"


def load_integers(cohort: Cohort, inbox: Message, initial: Tensor) -> bool:
    """Load the integer buffers that were sent, which the inbox then lacks, or else each client's own (`initial [Z]` at first).
    Returns whether they were sent."""
    sent = inbox.pop(INTEGERS, None)
    if cohort.layout.integers:
        own = cohort.memory.get(INTEGERS, initial.unsqueeze(0)) if sent is None else sent
        cohort.flat_module.load_integers(own)
    return sent is not None


def keep_integers(cohort: Cohort, reply: Message, sent: bool) -> None:
    """Put the integer buffers after training into the reply where they were `sent`, else into the memory of who uploads."""
    if sent:
        reply[INTEGERS] = cohort.flat_module.integers()
    elif cohort.layout.integers:
        cohort.memory.write(INTEGERS, cohort.flat_module.integers(), cohort.uploads)


class LocalEngine(Engine):
    """The half of an engine that this process directs: what clients remember lies in one store here.

    `chosen`: how it came to be this engine, where `make_engine` made it.
    """

    chosen: Choice | None = None
    task: Task

    def __init__(self, memory_budget: int) -> None:
        self.store = ClientStore(budget=memory_budget)
        self.notices: list[str] = []
        self._standing: list[str] | None = None

    def renew_notices(self) -> None:
        """Keep the notices from before the first round alone: others are of a federation that is over, or told already."""
        if self._standing is None:
            self._standing = list(self.notices)
        self.notices = list(self._standing)

    def notice(self, text: str) -> None:
        """Have the run say something, once."""
        if text not in self.notices:
            self.notices.append(text)

    def local_test(self) -> Partition:
        """The clients' own test samples. Raises `InvalidValue` where they have none."""
        if self.task.local_test is None:
            raise InvalidValue("the clients have no test data of their own: give the task local_test, such as 0.25")
        return self.task.local_test

    def commit(self) -> None:
        self.store.commit()

    def rollback(self) -> bool:
        return self.store.rollback()

    def memory(self) -> dict[str, Tensor]:
        return self.store.state()

    def release_memory(self) -> None:
        self.store.release()

    def restore_memory(self, memory: dict[str, Tensor]) -> None:
        self.store.restore(memory)

    def close(self) -> None:
        self.store.close()


def trained(algorithm: Algorithm, cohort: Cohort, inbox: Message) -> Message:
    """What `train` returns. Raises `InvalidValue` where that is no message with one row a client, or where it has changed its
    inbox in place, which other clients are sent too."""
    versions = {name: rows._version for name, rows in inbox.items()}
    held = dict(inbox)
    message = algorithm.train(cohort, inbox)
    wrong = _wrong_message(message, len(cohort.clients))
    changed = [name for name, rows in held.items() if rows._version != versions[name]]
    if not wrong and changed:
        wrong = f"changed inbox[{changed[0]!r}] in place, which others are sent too: change a clone() of it"
    if wrong:
        who = ", ".join(map(str, cohort.clients[:3])) + (", ..." if len(cohort.clients) > 3 else "")
        place = in_brackets(code_place(type(algorithm).train))
        raise InvalidValue(f"{type(algorithm).__name__}.train of client {who} {wrong}{place}")
    return dict(message)


def _wrong_message(message: object, clients: int) -> str:
    """Why that is no message with one row for each client, and what would be one."""
    if message is None:
        return 'returned nothing: it must return a message, such as {"model": cohort.fit(inbox["model"]).model}'
    if isinstance(message, Trained):
        return 'returned all that cohort.fit gives: return {"model": trained.model}'
    if not isinstance(message, Mapping):
        return f'returned a {type(message).__name__}: it must return named tensors, such as {{"model": weights}}'
    for name, rows in message.items():
        if not isinstance(rows, Tensor):
            cure = "give its .model" if isinstance(rows, Trained) else "give a tensor with one row a client"
            return f"returned {name!r} as {type(rows).__name__}: {cure}"
        if rows.dim() == 0 or len(rows) != clients:
            return (
                f"returned {name!r} of shape {list(rows.shape)}, without one row for each of {clients} clients: keep the "
                f"leading client axis, [{clients}, ...]"
            )
    return ""


def inspect_reply(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `RefusedReply` unless a reply has exactly the expected names and shapes, floats or integers, all finite."""
    if tensors.keys() != expected.keys():
        lacking = [f"lacks {name!r}" for name in sorted(expected.keys() - tensors.keys())]
        holding = [f"holds {name!r}" for name in sorted(tensors.keys() - expected.keys())]
        raise RefusedReply(f"the reply {' and '.join([*lacking, *holding])}, other than `expects` says")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            raise RefusedReply(f"{name!r} has shape {list(tensor.shape)}, not {list(shape)} as `expects` says")
        if tensor.is_complex():
            raise RefusedReply(f"{name!r} holds complex numbers")
        if (
            tensor.is_floating_point()
            and not bool(torch.isfinite(tensor.sum()))
            and not bool(torch.isfinite(tensor).all())
        ):
            raise NotFinite(f"{name!r} is not finite")
