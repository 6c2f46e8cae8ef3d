"""What a federation asks of the place where clients train: the interface of engines, and what
passes through it.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fedloom.errors import NotFinite
from fedloom.parts.pipeline import Pipeline
from fedloom.records import Aggregate, Exchange, Message
from fedloom.round import Round
from fedloom.rounds.scoring import Tally
from fedloom.task import Task


@dataclass(frozen=True)
class Job:
    """A client's work in a round: its number, slot (None: no upload), inbox, and its reply's weight
    if not its samples.
    """

    client: int
    slot: int | None
    inbox: Message
    weight: float | None = None


@dataclass(frozen=True)
class Answer:
    """One client's answer: named tensors without a client axis, and figures about its work.

    `gathered`: matrices `[slots, ...]` of its block (`Pipeline.block_size`), given away, in which
    the tensors lie already, in the row of its slot. `samples`: how many the client trains on, where
    it is not the task that knows.
    """

    job: Job
    tensors: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    gathered: Mapping[str, Tensor] = field(default_factory=dict)
    samples: int | None = None


@dataclass(frozen=True)
class Fault:
    """One client that did not answer, or whose answer was refused, and why."""

    job: Job
    reason: str
    error: Exception | None = None
    sent: bool = True  # whether the message went out to it

    @property
    def diverged(self) -> bool:
        """Return True if the client's training led to values that are not finite."""
        return isinstance(self.error, NotFinite)


@dataclass(frozen=True)
class FoldedBlock:
    """The replies to a block of slots, folded where its clients trained: their aggregate (None
    without any), integer buffers `[r, Z]`, and their bytes. Their `Reply` has no tensors then, and
    comes after it.
    """

    number: int
    aggregate: Aggregate | None
    integers: Tensor | None
    bytes: int


Result = Answer | Fault | FoldedBlock
"""What comes of training clients."""


class Engine(Protocol):
    """Runs the client half of a method.

    `train` lets the client of every task train, and yields results in any order. It holds least
    when blocks of slots (`slot_blocks`) come one after the other. `evaluate` lets each client make
    the model that it would use in `round` and scores that on the client's own test data; nothing of
    it lasts, and the models do not leave the engine.

    `begin` makes clients remember nothing; what memory cannot hold goes to the directory. After a
    round, what clients wrote stands (`commit`) or is undone (`rollback`, False when that cannot be
    done). `memory` is what a checkpoint must hold of it, may refer to files, and is empty where
    sites keep it; `restore_memory` takes it back, or raises `DamagedCheckpoint`. Once a checkpoint
    is on the disk, `release_memory` gives up what only those before the previous one needed.

    `notices`: what there is to say of how clients train, a line each. `in_process`: True where
    clients train in this process, False in others of this machine, None away from it.
    """

    notices: list[str]
    in_process: bool | None

    def train(self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]) -> Iterator[Result]: ...
    def evaluate(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> Iterator[Tally]: ...
    def begin(self, task: Task, directory: Path | None) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> bool: ...
    def memory(self) -> dict[str, Tensor]: ...
    def release_memory(self) -> None: ...
    def restore_memory(self, memory: dict[str, Tensor]) -> None: ...
    def close(self) -> None: ...


class FoldingEngine(ABC):
    """An engine that may fold blocks of slots where clients train, to the bits of folding them
    here.
    """

    @abstractmethod
    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job], fold: Exchange | None = None
    ) -> Iterator[Result]:
        """Train the clients; with the round's exchange as `fold`, blocks may come folded."""


class RemoteClients:
    """An engine whose clients are strangers: by what they claim none gets more than `largest_share`
    of a round's weight.
    """

    largest_share: float

    @property
    def under_way(self) -> frozenset[int]:
        """The clients that train from an earlier round on, for an asynchronous method."""
        return frozenset()


def slot_blocks(jobs: Sequence[Job], round: Round, slots: int) -> dict[int, list[Job]]:
    """Return the tasks of each block of so many slots. Clients that train without uploading come
    last, in the next slots.
    """
    blocks: defaultdict[int, list[Job]] = defaultdict(list)
    beyond = count(len(round.selected))
    for job in jobs:
        blocks[(next(beyond) if job.slot is None else job.slot) // slots].append(job)
    return dict(sorted(blocks.items()))


def inbox_of(message: Message, index: int) -> Message:
    """Return the rows `[1, ...]` of a message that receiver `index` is sent; a single row is for
    all.
    """
    return {
        name: rows[index : index + 1] if len(rows) > 1 else rows for name, rows in message.items()
    }
