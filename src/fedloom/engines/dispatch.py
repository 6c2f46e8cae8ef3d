"""Engines that train clients in other processes: how clients are spread over workers, and dead
workers replaced.
"""

import copy
import math
import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.engines.base import LocalEngine
from fedloom.engines.client_work import (
    Assignment,
    ClientResult,
    ClientWork,
    Setup,
    Work,
    WorkDone,
    slim,
)
from fedloom.engines.proof import Proof
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import FedloomError, InvalidValue, error_text
from fedloom.flat.device import keep_pages
from fedloom.parts.pipeline import Pipeline
from fedloom.records import Exchange, Specs
from fedloom.round import Round
from fedloom.rounds.engine import Answer, Fault, FoldingEngine, Job, Result, slot_blocks
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

ATTEMPTS = 3
"""Deaths of its worker after which a client fails."""

CLIENTS_AHEAD = 2
"""Clients per worker that may be handed out beyond the block of slots whose replies are folded
next.
"""

BLOCKS = 2
"""Fewest blocks of slots per worker for workers to fold them: with two, a slow worker leaves its
second to the others.
"""

MOST_WORKERS = max(64, 4 * (os.cpu_count() or 1))
"""Upper limit for workers and for the threads of each: more cannot help on this machine."""

Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]


Group = tuple[int, Sequence[Job]]
"""Number of a block of slots, and clients of it that are handed out together."""


class CannotSend(InvalidValue):
    """A task, a method or a message cannot be pickled, so that no worker can have it."""


class WorkerDied(Exception):
    """A worker process or actor has ended; the text says how, in one line."""


class WorkerHandle(ABC):
    """The engine's side of one worker."""

    def __init__(self) -> None:
        self.group: Group | None = None  # whose answers are awaited
        self.busy, self.ready = True, False  # an answer is due; it has answered once
        self._setup: Any = None
        self._assignment: Any = None

    def give(self, setup: Any, assignment: Any, work: Any, group: Group) -> None:
        """Send it clients to work on, with the setup and the assignment if it lacks them. Messages
        are packed.
        """
        self.group, self.busy = group, True
        begins = self._setup is not setup
        announced = assignment if begins or self._assignment is not assignment else None
        self._setup, self._assignment = setup, assignment
        self.send(setup if begins else None, announced, work)

    def listen(self) -> WorkDone | Exception:
        """Receive its answers, the first of which only says that it has started. Raises
        `WorkerDied`.
        """
        answers = self.receive()
        self.group, self.busy, self.ready = None, False, True
        if isinstance(answers, Exception):
            self._setup = None  # it may lack it
        return answers

    @abstractmethod
    def send(self, setup: Any, assignment: Any, work: Any) -> None:
        """Send messages to the worker's `ClientTrainer.take`. If the worker is dead, `receive`
        reports it.
        """

    @abstractmethod
    def receive(self) -> WorkDone | Exception:
        """Receive the answers for `listen`."""

    @abstractmethod
    def end(self) -> None:
        """Stop it at once. Nothing is lost: a worker keeps nothing between two pieces of work."""


@dataclass
class ReplyMatrices:
    """Matrices `[size, ...]` of the `expected` tensors of each block of slots, made when a client
    of it is handed out.
    """

    expected: Specs
    slots: int
    size: int
    empty: Callable[[Sequence[int], torch.dtype], Tensor]
    blocks: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def block(self, slot: int | None) -> dict[str, Tensor]:
        """Return the matrices of a slot's block; none for a client without a slot."""
        if slot is None:
            return {}
        number = slot // self.size
        if number not in self.blocks:
            rows = min(self.size, self.slots - number * self.size)
            specs = [
                (name, shape, dtype) for name, (shape, dtype) in self.expected.items() if dtype
            ]
            self.blocks[number] = {
                name: self.empty((rows, *shape), dtype) for name, shape, dtype in specs
            }
        return self.blocks[number]

    def rows(self, slot: int | None) -> dict[str, Tensor]:
        """Return the rows of one slot."""
        return {
            name: matrix[0 if slot is None else slot % self.size]
            for name, matrix in self.block(slot).items()
        }


class WorkerEngine(LocalEngine, FoldingEngine):
    """Base of the engines that train clients in other processes. Subclasses start the workers and
    carry messages.

    A client's result depends only on the round, the seed, its number, its inbox and its memory, and
    its memory is updated here, when the result arrives. So if a worker dies, another replaces it
    and its clients train again, one at a time, with the same result. A client whose worker dies
    three times fails.
    """

    in_process: bool | None = None
    name: ClassVar[str]
    kind: ClassVar[str]  # name of a worker in messages
    shares_memory: ClassVar[bool] = False  # workers write replies into memory of this process

    def __init__(
        self, workers: int, inside: Literal["rows", "stacked"], memory_budget: int
    ) -> None:
        super().__init__(memory_budget)
        self.workers = workers
        self.inside: Literal["rows", "stacked"] = inside
        self._handles: list[WorkerHandle] = []
        self._failed_starts = 0
        self.workers_fold = True

    # --- what subclasses provide ---

    @abstractmethod
    def _start(self) -> WorkerHandle:
        """Start a worker."""

    @abstractmethod
    def _wait(self, handles: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        """Wait until at least one of these busy workers has answered, and return all that have."""

    @abstractmethod
    def _pack(self, message: object, common: Mapping[int, int]) -> Any:
        """Pickle a message for one worker, without the tensors that it has (`common`). Raises
        whatever pickling raises.
        """

    def _publish(self, packed: Any) -> Any:
        """Make a packed message readable by all workers."""
        return packed

    @abstractmethod
    def _setup_for(self, task: Task) -> Setup:
        """Return the setup of workers for a task."""

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor for replies."""
        return torch.empty(*shape, dtype=dtype)

    @abstractmethod
    def _groups(self, pipeline: Pipeline, jobs: Sequence[Job]) -> list[list[Job]]:
        """Return the groups in which clients are handed out, in order."""

    def _proven_setup(
        self, task: Task, chunk: int | None = None, proof: Proof | None = None
    ) -> Setup:
        """Return a setup with the task's proof, so that workers need none of their own, and how
        many clients advance together.
        """
        kind = StackedEngine if self.inside == "stacked" else RowsEngine
        engine = kind(task, proof, **({} if chunk is None else {"chunk": chunk}))
        for text in engine.notices:
            self.notice(text)
        chunk = 1 if engine.proof.unstackable else engine.chunk
        return Setup(slim(task), "rows" if chunk == 1 else "stacked", chunk, engine.proof)

    # --- the engine ---

    def begin(self, task: Task, directory: Path | None) -> None:
        if task is not self.task:
            self._announce(task)
        self.renew_notices()
        self.store.begin(directory)
        keep_pages()

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job], fold: Exchange | None = None
    ) -> Iterator[Result]:
        """Train; workers fold whole blocks of slots where all clients are sent one model."""
        expected = pipeline.expected(round)
        slots = [job.slot + 1 for job in jobs if job.slot is not None]
        size = pipeline.block_size
        gathered, pools = max([len(round.selected), *slots]), pipeline.plan.pools
        fitting = {
            name: s
            for name, s in expected.items()
            if not pools.takes(min(size, gathered) * s.bytes)
        }
        matrices = ReplyMatrices(fitting, gathered, size, self._empty)
        blocks = slot_blocks(jobs, round, size)
        assignment = Assignment(pipeline, round, expected, _common(jobs))
        if (
            self.workers_fold
            and fold is not None
            and fold.shared
            and len(blocks) >= BLOCKS * self.workers
        ):
            state = pipeline.state()
            assignment = replace(assignment, exchange=fold, state=state, slots=gathered, size=size)
        for group, answers in self._answers("train", assignment, blocks, matrices):
            if answers.folded is not None:
                # the memory of an answer is reused later, or read-only
                yield copy.deepcopy(answers.folded)
            for job, result in zip(group, answers.results, strict=True):
                if isinstance(result, Fault):
                    yield Fault(job, result.reason, result.error)
                    continue
                assert isinstance(result, ClientResult)
                if result.written:
                    self.store.write(
                        job.client, {name: rows.clone() for name, rows in result.written.items()}
                    )
                if answers.folded is not None:
                    yield Answer(job, {}, result.metrics)
                    continue
                tensors = matrices.rows(job.slot)
                for name, tensor in result.tensors.items():
                    tensors[name] = (
                        tensors[name].copy_(tensor) if name in tensors else tensor.clone()
                    )
                yield Answer(job, tensors, result.metrics, matrices.block(job.slot))

    def evaluate(self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]) -> Iterator[Tally]:
        assignment = Assignment(pipeline, round, {}, _common(jobs))
        no_replies = ReplyMatrices({}, 0, 1, self._empty)
        for _, answers in self._answers("evaluate", assignment, {0: jobs}, no_replies):
            for result in answers.results:
                if isinstance(result, Fault):
                    raise result.error or FedloomError(result.reason)
                assert isinstance(result, Tally)
                yield result

    def close(self) -> None:
        end_all(self._handles)
        self.store.close()

    # --- the work of a round ---

    def _answers(
        self,
        kind: Literal["train", "evaluate"],
        assignment: Assignment,
        blocks: Mapping[int, Sequence[Job]],
        matrices: ReplyMatrices,
    ) -> Iterator[tuple[Sequence[Job], WorkDone]]:
        """Yield each group with its answers as they arrive. Blocks are handed out in order, few of
        them at a time.
        """
        self._forget()
        common = {id(rows): index for index, rows in enumerate(assignment.common)}
        announced = self._publish(self._packed(assignment))
        fold = assignment.exchange is not None
        waiting: deque[Group] = deque()
        for number, tasks in blocks.items():
            groups = [list(tasks)] if fold else self._groups(assignment.pipeline, tasks)
            waiting.extend((number, group) for group in groups)
        unanswered = {number: len(tasks) for number, tasks in blocks.items()}
        begun = (
            BLOCKS * self.workers
            if fold
            else 1 + math.ceil(CLIENTS_AHEAD * self.workers / matrices.size)
        )
        deaths: Counter[int] = Counter()

        def give(handle: WorkerHandle) -> None:
            """Hand out the next group, unless the worker is busy or the group's block lies too far
            ahead.
            """
            if not waiting or handle.busy or waiting[0][0] >= min(unanswered) + begun:
                return
            number, group = waiting.popleft()
            uploads = any(job.slot is not None for job in group)
            full = fold and uploads and len(group) == len(blocks[number])
            shared = self.shares_memory and not full
            clients = tuple(
                ClientWork(
                    task, self.store.read(task.client), matrices.rows(task.slot) if shared else {}
                )
                for task in group
            )
            handle.give(
                self._setup,
                announced,
                self._packed(Work(kind, clients, full), common),
                (number, group),
            )

        try:
            while waiting or any(handle.group for handle in self._handles):
                if waiting:
                    self._start_missing()
                for handle in self._handles:
                    give(handle)
                for handle in self._wait([handle for handle in self._handles if handle.busy]):
                    number, group = handle.group or (0, [])
                    try:
                        answers = self._listen(handle)
                    except WorkerDied as death:
                        deaths.update(id(job) for job in group)
                        if len(group) != 1 or deaths[id(group[0])] < ATTEMPTS:
                            # One at a time, so that a client that kills its worker does not fail
                            # its neighbours.
                            waiting.extendleft((number, [job]) for job in reversed(group))
                            continue
                        reason = f"its {self.kind} died {ATTEMPTS} times ({death})"
                        error = FedloomError(f"client {group[0].client}: {reason}")
                        answers = WorkDone((Fault(group[0], reason, error),), ())
                    # before the yield, so that the worker need not wait for the caller
                    give(handle)
                    if not group:
                        continue
                    if isinstance(answers, Exception):
                        raise answers
                    for text in answers.notices:
                        self.notice(text)
                    yield group, answers
                    unanswered[number] -= len(group)
                    if not unanswered[number]:
                        del unanswered[number]
                        matrices.blocks.pop(number, None)
        finally:
            self._forget()

    def _listen(self, handle: WorkerHandle) -> WorkDone | Exception:
        """Receive a worker's answers. Raises `WorkerDied`, or `FedloomError` if workers keep dying
        while they start.
        """
        try:
            answers = handle.listen()
        except WorkerDied as death:
            self._handles.remove(handle)
            handle.end()
            self._failed_starts += not handle.ready
            if self._failed_starts >= ATTEMPTS:
                self._failed_starts = 0
                raise FedloomError(
                    f"engine {self.name!r}: no {self.kind} can start ({death})"
                ) from None
            raise
        self._failed_starts = 0
        return answers

    def _sizes(self, jobs: Sequence[Job]) -> Tensor:
        return self.task.sizes(torch.tensor([job.client for job in jobs], dtype=torch.int64))

    def _start_missing(self) -> None:
        try:
            while len(self._handles) < self.workers:
                self._handles.append(self._start())
        except OSError as error:
            raise FedloomError(
                f"engine {self.name!r}: no {self.kind} can start ({error})"
            ) from error

    def _forget(self) -> None:
        """Stop waiting for answers: busy workers finish their work, and their answers are ignored."""
        for handle in self._handles:
            handle.group = None

    def _announce(self, task: Task) -> None:
        """Make the setup of workers for a task. Raises `InvalidValue` for a task that this engine
        cannot train on.
        """
        if task.initial.is_cuda:
            raise InvalidValue(
                f"engine {self.name!r} takes a task on the CPU, not on {task.initial.device}"
            )
        self.notices, self._standing = [], None
        setup = self._setup_for(task)
        self.task = task
        self._setup = self._publish(self._packed(setup))

    def _packed(self, message: object, common: Mapping[int, int] | None = None) -> Any:
        """Pack a message. Raises `CannotSend` if it cannot be pickled."""
        try:
            return self._pack(message, common or {})
        except Exception as error:
            raise CannotSend(
                f"engine {self.name!r} cannot send this to its workers: {error_text(error)}"
            ) from error


def grouped(jobs: Sequence[Job], sizes: Tensor, count: int, most: int) -> list[list[Job]]:
    """Split the clients into about `count` groups of at most `most`, with about equally many
    samples (`sizes [n]`).

    Largest clients come first, since short groups fill the gaps at the end, and clients of similar
    sizes share a group.
    """
    groups: list[list[Job]] = []
    current: list[Job] = []
    filled, remaining = 0, int(sizes.sum())
    for index in sizes.argsort(descending=True, stable=True).tolist():
        size = int(sizes[index])
        missing = max(1, min(count, len(jobs)) - len(groups))
        if len(current) == most or (
            current and missing > 1 and filled + size / 2 > remaining / missing
        ):
            groups.append(current)
            remaining, current, filled = remaining - filled, [], 0
        current.append(jobs[index])
        filled += size
    return [*groups, current] if current else groups


def end_all(handles: list[WorkerHandle]) -> None:
    """End all workers and empty the list."""
    while handles:
        handles.pop().end()


def _common(jobs: Sequence[Job]) -> tuple[Tensor, ...]:
    """Return the tensors that are sent to several clients."""
    counts = Counter(id(rows) for job in jobs for rows in job.inbox.values())
    by_id = {id(rows): rows for job in jobs for rows in job.inbox.values()}
    return tuple(rows for key, rows in by_id.items() if counts[key] > 1)
