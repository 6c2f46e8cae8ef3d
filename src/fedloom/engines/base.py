"""What engines share: their registry, client memory, integer buffers and the inspection of replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm import Message
from fedloom.config.registry import Registry
from fedloom.data.partition import Partition
from fedloom.errors import InvalidValue, NotFinite, RefusedReply
from fedloom.local.cohort import Cohort
from fedloom.rounds.engine import INTEGERS, Engine
from fedloom.state.store import ClientStore
from fedloom.task import Task

# An engine is a class (task, *, options) that registers itself: @engines.register("rows").
engines: Registry[Callable[..., Any]] = Registry("engine", "fedloom.engines")


@dataclass(frozen=True)
class Choice:
    """Which engine was taken, and why where nobody named it: the rule's `reason`, or the seconds of a trial round in each."""

    name: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def named(self) -> bool:
        """Whether it was taken by its name."""
        return not self.reason and not self.seconds

    def __str__(self) -> str:
        measured = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.seconds.items())
        return self.name if self.named else f"{self.name} ({self.reason or f'trial round: {measured}'})"


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


def inspect_reply(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `RefusedReply` unless a reply has exactly the expected names and shapes, floats or integers, all finite."""
    if tensors.keys() != expected.keys():
        raise RefusedReply(f"tensors {sorted(tensors)} where {sorted(expected)} are expected")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            raise RefusedReply(f"{name!r} has shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.is_complex():
            raise RefusedReply(f"{name!r} holds complex numbers")
        if (
            tensor.is_floating_point()
            and not bool(torch.isfinite(tensor.sum()))
            and not bool(torch.isfinite(tensor).all())
        ):
            raise NotFinite(f"{name!r} is not finite")
