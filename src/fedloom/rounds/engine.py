"""Engine protocol and its message types: jobs, answers and faults."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fedloom.algorithm.records import Aggregate, Exchange, Message
from fedloom.common.errors import NotFinite
from fedloom.common.round import Round
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.scoring import Tally
from fedloom.task import Task


@dataclass(frozen=True)
class Job:
    """The work of one client in a round.

    Attributes:
        client: Number of the client.
        slot: Position of its reply in the round. None: the client trains without uploading.
        inbox: The message for the client.
        weight: Weight of its reply. None: the number of its samples.
    """

    client: int
    slot: int | None
    inbox: Message
    weight: float | None = None


@dataclass(frozen=True)
class Answer:
    """The answer of one client.

    Attributes:
        job: The work that it answers.
        tensors: Uploaded tensors by name, without a client axis.
        metrics: Figures of the training by name.
        gathered: Matrices `[slots, ...]` of the block (`Pipeline.block_size`). They already contain
            the tensors, in the row of the slot, and the receiver may modify them.
        samples: Number of training samples of the client, if the task does not have it.
    """

    job: Job
    tensors: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    gathered: Mapping[str, Tensor] = field(default_factory=dict)
    samples: int | None = None


@dataclass(frozen=True)
class Fault:
    """A client without a valid answer, and the reason.

    Attributes:
        job: The work that was not done.
        reason: Text for the user.
        error: The cause, if the client raised an error or its reply was refused.
        sent: True if the message was sent to the client.
    """

    job: Job
    reason: str
    error: Exception | None = None
    sent: bool = True

    @property
    def diverged(self) -> bool:
        """Return True if the client's training produced infinite or NaN values."""
        return isinstance(self.error, NotFinite)


@dataclass(frozen=True)
class FoldedBlock:
    """The replies of a block of slots, folded into one aggregate in the process of the clients.

    The answers of these clients have no tensors, and follow the folded block.

    Attributes:
        number: Number of the block.
        aggregate: Aggregate of the replies. None if no client replied.
        integers: Integer buffers of the replies, `[r, Z]`, or None.
        bytes: Size of the replies.
    """

    number: int
    aggregate: Aggregate | None
    integers: Tensor | None
    bytes: int


Result = Answer | Fault | FoldedBlock
"""Results of training, as engines yield them."""


class Engine(Protocol):
    """Runs the client side of a method.

    `train` trains the client of every job, and yields results in any order. It needs the least
    memory if blocks of slots (`slot_blocks`) arrive one after the other. `evaluate` creates the
    model that each client would use in `round`, and scores it on the client's own test data. It
    changes no client memory, and the models do not leave the engine.

    `begin` clears the memory of all clients. Memory that does not fit into RAM is stored in
    `directory`. After a round, `commit` accepts the changes of client memory, or `rollback` undoes
    them. `rollback` returns False if this is impossible. `memory` returns the tensors of a
    checkpoint. They may refer to files, and are empty if sites store the memory themselves.
    `restore_memory` restores them, or raises `DamagedCheckpoint`. `release_memory` is called when a
    checkpoint is on the disk. It removes the files that neither this checkpoint nor the previous
    one needs.

    Attributes:
        notices: Warnings for the user, one line each.
        in_process: True if clients train in this process, False if in other processes of this
            machine, None if on other machines.
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
    """An engine that can fold blocks of slots in the processes that train the clients.

    The aggregate is bitwise equal to the aggregate of replies that are folded in this process.
    """

    @abstractmethod
    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job], fold: Exchange | None = None
    ) -> Iterator[Result]:
        """Train the clients, and fold blocks of replies if `fold` is the exchange of the round.

        Args:
            pipeline: Pipeline of the round.
            round: The round.
            jobs: Jobs of the clients.
            fold: Record of the round; None to return every reply unfolded.

        Yields:
            Answers and faults in any order, and folded blocks.
        """


class RemoteClients:
    """Base class of engines with untrusted clients.

    Attributes:
        largest_share: Largest share of a round's weight that one client gets, whatever number of
            samples it reports.
    """

    largest_share: float

    @property
    def under_way(self) -> frozenset[int]:
        """Clients that still train from an earlier round, for asynchronous methods."""
        return frozenset()


def slot_blocks(jobs: Sequence[Job], round: Round, slots: int) -> dict[int, list[Job]]:
    """Group jobs into blocks of consecutive slots.

    Args:
        jobs: Jobs of the round. Clients that do not upload get the slots after all others.
        round: The round.
        slots: Number of slots of a block.

    Returns:
        The jobs by number of the block, in increasing order.
    """
    blocks: defaultdict[int, list[Job]] = defaultdict(list)
    next_slots = count(len(round.selected))
    for job in jobs:
        slot = next(next_slots) if job.slot is None else job.slot
        blocks[slot // slots].append(job)
    return dict(sorted(blocks.items()))


def inbox_of(message: Message, index: int) -> Message:
    """Return the message for one receiver.

    Args:
        message: Tensors by name, with one row per receiver or one row for all receivers.
        index: Number of the receiver.

    Returns:
        Tensors by name, `[1, ...]`.
    """
    return {
        name: rows[index : index + 1] if len(rows) > 1 else rows for name, rows in message.items()
    }
