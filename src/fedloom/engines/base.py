"""What an engine is: a place where cohorts run. It is given inboxes and gives replies back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message
from fedloom.config.registry import Registry
from fedloom.data.partition import Partition
from fedloom.errors import InvalidValue, NotFinite, RefusedReply
from fedloom.flat.layout import Layout
from fedloom.local.cohort import Cohort
from fedloom.round import Round
from fedloom.rounds.scoring import Tally
from fedloom.state.store import ClientStore
from fedloom.task import Task

# An engine is a class (task, *, options) that registers itself: @engines.register("rows").
engines: Registry[Callable[..., Any]] = Registry("engine", "fedloom.engines")

INTEGERS = "integers"
"""Name under which a model's integer buffers travel beside the method's own tensors, when the model has any."""


@dataclass(frozen=True)
class ClientTask:
    """One client's work in a round: its number, its slot (None: it trains without uploading) and its inbox, one row each."""

    client: int
    slot: int | None
    inbox: Message


@dataclass(frozen=True)
class Reply:
    """One client's answer: named tensors without a client axis, and figures about its work.

    `gathered`: matrices `[slots, ...]` of this round in which the tensors lie already, each in the row of its slot, where the
    engine had the replies written there; they are given away. `samples`: how many the client trains on, where it is not the
    task that knows.
    """

    client_task: ClientTask
    tensors: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    gathered: Mapping[str, Tensor] = field(default_factory=dict)
    samples: int | None = None


@dataclass(frozen=True)
class Fault:
    """One client that did not answer, or whose answer was refused, and why."""

    client_task: ClientTask
    reason: str
    error: Exception | None = None
    sent: bool = True  # whether the message went out to it

    @property
    def diverged(self) -> bool:
        """Whether the client's training led to values that are not finite."""
        return isinstance(self.error, NotFinite)


@dataclass(frozen=True)
class Choice:
    """Which engine was taken, and the seconds of a trial round in each that was measured (none where it was named)."""

    name: str
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        measured = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.seconds.items())
        return f"{self.name} (trial round: {measured})" if measured else self.name


class Engine(Protocol):
    """Runs the client half of a method. Results may come in any order; the federation puts them in theirs.

    `notices`: what there is to say of how clients train, a line each, in the order in which it came up.
    """

    notices: list[str]

    in_process: bool | None
    """Whether clients train in this process (True), in others of this machine (False), or away from it (None)."""

    def train(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Reply | Fault]:
        """Let every client of `orders` train."""

    def evaluate(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Tally]:
        """Let every client of `orders` make the model it would use, and score that on the client's own test data.

        `round` is one that has not begun. Nothing of it lasts: clients remember nothing, random streams and statistics stay as
        they are. The models do not leave the engine. Tallies of one client or several come in any order.
        """

    def begin(self, task: Task, directory: Path | None) -> None:
        """A federation on `task` begins: no client remembers anything, and what memory cannot hold goes to `directory`."""

    def commit(self) -> None:
        """Every client of the round has trained: what they wrote to their memory stands."""

    def rollback(self) -> bool:
        """The round did not come to its end: undo what clients wrote since `commit`. False when that cannot be done."""

    def memory(self) -> dict[str, Tensor]:
        """What the clients remember, for a checkpoint (empty where sites keep it themselves). It may refer to files."""

    def release_memory(self) -> None:
        """A checkpoint with the last `memory` is on the disk: give up what only those before the previous one needed."""

    def restore_memory(self, memory: dict[str, Tensor]) -> None:
        """Take back what `memory` returned. Raises `DamagedCheckpoint` when files it refers to are missing."""

    def close(self) -> None:
        """Give back what the engine holds."""


class RemoteClients:
    """An engine whose clients are sites of their own, and strangers: they exchange layers among themselves where a method asks
    for it, and what they say of their numbers of samples gives none of them more than `largest_share` of a round's weight."""

    largest_share: float


def row_for(rows: Tensor, place: int) -> Tensor:
    """What the receiver at `place` is sent of `[k, ...]`, with its leading axis; one row is for all."""
    return rows[place : place + 1] if len(rows) > 1 else rows


def expectations(algorithm: Algorithm, round: Round, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in a client's reply. Integer buffers, such as the counters of batch norm, travel with whole
    models; where part of the model stays with the client, so do they."""
    expected = dict(algorithm.expects(round))
    whole = expected.get("model", (layout.size,)) == (layout.size,)
    return expected | {INTEGERS: (layout.integers,)} if layout.integers and whole else expected


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
