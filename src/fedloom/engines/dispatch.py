"""Base of engines that train clients in other processes.

It distributes clients over workers and replaces dead workers.
"""

import copy
import math
import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm.records import Exchange, Specs
from fedloom.common.device import keep_pages
from fedloom.common.errors import FedloomError, InvalidValue, error_text
from fedloom.common.round import Round
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
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Answer, Fault, FoldingEngine, Job, Result, slot_blocks
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

ATTEMPTS = 3
"""Number of times that a client's worker may die before the client fails."""

CLIENTS_AHEAD = 2
"""Clients per worker that may be handed out beyond the next block of slots to be folded."""

BLOCKS = 2
"""Smallest number of blocks of slots per worker for which workers fold blocks.

With two, other workers can take the second block of a slow worker.
"""

MOST_WORKERS = max(64, 4 * (os.cpu_count() or 1))
"""Upper limit of workers, and of threads per worker. More do not help on this machine."""

Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]


Group = tuple[int, Sequence[Job]]
"""Number of a block of slots, and jobs of this block that one worker receives."""


class CannotSend(InvalidValue):
    """A task, a method or a message cannot be pickled, so it cannot be sent to workers."""


class WorkerDied(Exception):
    """A worker process or actor has ended. The text is the reason in one line."""


class WorkerHandle(ABC):
    """The engine's side of one worker."""

    def __init__(self) -> None:
        self.group: Group | None = None  # the group in work; None: the next answer is ignored
        self.busy = True  # the worker has not answered its last message yet
        self.ready = False  # the worker has started
        self._setup: Any = None
        self._assignment: Any = None

    def submit(self, setup: Any, assignment: Any, work: Any, group: Group) -> None:
        """Send packed work to the worker.

        Args:
            setup: Packed `Setup`. It is sent only if the worker has another one.
            assignment: Packed `Assignment`. It is sent only if the worker has another one.
            work: Packed `Work`.
            group: The jobs of the work.
        """
        self.group = group
        self.busy = True
        new_setup = self._setup is not setup
        new_assignment = new_setup or self._assignment is not assignment
        self._setup = setup
        self._assignment = assignment
        self.send(setup if new_setup else None, assignment if new_assignment else None, work)

    def collect(self) -> WorkDone | Exception:
        """Receive the worker's answer, or raise `WorkerDied`.

        The first answer of a worker has no results. It reports that the worker has started.
        """
        answers = self.receive()
        self.group = None
        self.busy = False
        self.ready = True
        if isinstance(answers, Exception):
            self._setup = None  # the worker may have failed to load it: send it again
        return answers

    @abstractmethod
    def send(self, setup: Any, assignment: Any, work: Any) -> None:
        """Send messages to the worker's `ClientTrainer.take`. Report a dead worker in `receive`.

        Args:
            setup: Packed `Setup`; None if the worker has it already.
            assignment: Packed `Assignment`; None if the worker has it already.
            work: Packed `Work`.
        """

    @abstractmethod
    def receive(self) -> WorkDone | Exception:
        """Receive the answer of the worker."""

    @abstractmethod
    def end(self) -> None:
        """Stop the worker at once. No data is lost: workers have no state between messages."""


@dataclass
class ReplyMatrices:
    """Matrices for the replies of each block of slots, allocated when its first client is sent.

    Attributes:
        expected: Shapes and types of the reply of one client.
        slots: Number of slots of the round.
        size: Number of slots in a block. Matrices are `[size, ...]`.
        empty: Allocates a tensor.
        blocks: Matrices by number of the block and name.
    """

    expected: Specs
    slots: int
    size: int
    empty: Callable[[Sequence[int], torch.dtype], Tensor]
    blocks: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def block(self, slot: int | None) -> dict[str, Tensor]:
        """Return the matrices of a slot's block. Clients without a slot have none."""
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


class GroupQueue:
    """Groups of clients that wait for a worker, in the order of their blocks.

    Args:
        groups: The groups.
        blocks: Jobs of the round by number of the block.
        span: Workers only receive groups of the first unfinished block and the `span - 1` blocks
            after it, so that few blocks need memory.
    """

    def __init__(
        self, groups: Iterable[Group], blocks: Mapping[int, Sequence[Job]], span: int
    ) -> None:
        self.waiting = deque(groups)
        self._unanswered = {number: len(jobs) for number, jobs in blocks.items()}
        self._span = span
        self._deaths: Counter[int] = Counter()  # by id of the job

    def next_group(self) -> Group | None:
        """Remove and return the next group. None if none waits, or its block is too far ahead."""
        if not self.waiting or self.waiting[0][0] >= min(self._unanswered) + self._span:
            return None
        return self.waiting.popleft()

    def retry(self, group: Group) -> bool:
        """Put back the clients of a dead worker. Return False if a client has no attempt left.

        They wait as single clients: a client that kills its worker must not fail other clients.
        """
        number, jobs = group
        self._deaths.update(id(job) for job in jobs)
        if len(jobs) == 1 and self._deaths[id(jobs[0])] >= ATTEMPTS:
            return False
        self.waiting.extendleft((number, [job]) for job in reversed(jobs))
        return True

    def finish(self, group: Group) -> bool:
        """Count the clients of a group as answered. Return True if its block is finished."""
        number, jobs = group
        self._unanswered[number] -= len(jobs)
        if self._unanswered[number]:
            return False
        del self._unanswered[number]
        return True


class WorkerEngine(LocalEngine, FoldingEngine):
    """Base class of engines that train clients in other processes.

    Subclasses start the workers and transport the messages.

    A client's result depends only on the round, the seed, its number, its inbox and its memory.
    This process updates the memory when the result arrives. Therefore the engine can replace a dead
    worker: its clients train again, one at a time, with the same result. A client fails when its
    worker has died three times.
    """

    in_process: bool | None = None
    name: ClassVar[str]
    kind: ClassVar[str]  # name of a worker in messages to the user
    shares_memory: ClassVar[bool] = False  # True if workers write replies into shared memory

    def __init__(
        self, workers: int, inside: Literal["rows", "stacked"], memory_budget: int
    ) -> None:
        super().__init__(memory_budget)
        self.workers = workers
        self.inside: Literal["rows", "stacked"] = inside
        self._handles: list[WorkerHandle] = []
        self._failed_starts = 0
        self.workers_fold = True

    # --- implemented by subclasses ---

    @abstractmethod
    def _start(self) -> WorkerHandle:
        """Start a worker."""

    @abstractmethod
    def _wait(self, handles: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        """Wait until at least one of these busy workers has answered. Return all that have."""

    @abstractmethod
    def _pack(self, message: object, common: Mapping[int, int]) -> Any:
        """Pickle a message. Raises the exceptions of pickling.

        `common` has the indices of tensors that the worker already has, by their ids.
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
        """Split jobs into the groups that workers receive, in order."""

    def _proven_setup(
        self, task: Task, chunk: int | None = None, proof: Proof | None = None
    ) -> Setup:
        """Return a setup with the task's proof, so that workers do not repeat it."""
        kind = StackedEngine if self.inside == "stacked" else RowsEngine
        engine = kind(task, proof, **({} if chunk is None else {"chunk": chunk}))
        for text in engine.notices:
            self.notice(text)
        chunk = 1 if engine.proof.unstackable else engine.chunk
        return Setup(slim(task), "rows" if chunk == 1 else "stacked", chunk, engine.proof)

    # --- the engine ---

    def begin(self, task: Task, directory: Path | None) -> None:
        if task is not self.task:
            self._set_task(task)
        self.reset_notices()
        self.store.begin(directory)
        keep_pages()

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job], fold: Exchange | None = None
    ) -> Iterator[Result]:
        """Train the clients in the workers.

        Args:
            pipeline: Pipeline of the round.
            round: The round.
            jobs: Jobs of the clients.
            fold: Record of the round. Workers then fold whole blocks of slots, if all clients
                receive the same message and there are enough blocks.

        Yields:
            Answers and faults in the order in which workers finish. A folded block comes before its
            answers. They have no tensors.
        """
        expected = pipeline.expected(round)
        slots = [job.slot + 1 for job in jobs if job.slot is not None]
        size = pipeline.block_size
        gathered = max([len(round.selected), *slots])
        pools = pipeline.plan.pools
        in_memory = {
            name: spec
            for name, spec in expected.items()
            if not pools.takes(min(size, gathered) * spec.bytes)
        }
        matrices = ReplyMatrices(in_memory, gathered, size, self._empty)
        blocks = slot_blocks(jobs, round, size)
        assignment = Assignment(pipeline, round, expected, _shared_tensors(jobs))
        if (
            self.workers_fold
            and fold is not None
            and fold.shared
            and len(blocks) >= BLOCKS * self.workers
        ):
            state = pipeline.state()
            assignment = replace(assignment, exchange=fold, state=state, slots=gathered, size=size)
        for group, answers in self._run_groups("train", assignment, blocks, matrices):
            if answers.folded is not None:
                # Copy it: the memory of an answer is read-only, or used again later.
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
        assignment = Assignment(pipeline, round, {}, _shared_tensors(jobs))
        no_replies = ReplyMatrices({}, 0, 1, self._empty)
        for _, answers in self._run_groups("evaluate", assignment, {0: jobs}, no_replies):
            for result in answers.results:
                if isinstance(result, Fault):
                    raise result.error or FedloomError(result.reason)
                assert isinstance(result, Tally)
                yield result

    def close(self) -> None:
        end_all(self._handles)
        self.store.close()

    # --- the work of a round ---

    def _run_groups(
        self,
        kind: Literal["train", "evaluate"],
        assignment: Assignment,
        blocks: Mapping[int, Sequence[Job]],
        matrices: ReplyMatrices,
    ) -> Iterator[tuple[Sequence[Job], WorkDone]]:
        """Yield the jobs and answers of each group, in order of arrival."""
        self._ignore_answers()
        packed_assignment = self._publish(self._packed(assignment))
        pack_work = partial(self._pack_work, kind, assignment, blocks, matrices)
        queue = self._queue(assignment, blocks, matrices.size)
        hand_out = partial(self._hand_out, queue, packed_assignment, pack_work)
        try:
            while queue.waiting or any(handle.group for handle in self._handles):
                if queue.waiting:
                    self._start_missing()
                for handle in self._handles:
                    hand_out(handle)
                for handle in self._wait([handle for handle in self._handles if handle.busy]):
                    group = handle.group or (0, [])
                    answers = self._collect_or_retry(handle, group, queue)
                    if answers is None:
                        continue
                    # Before the yield, so that the worker need not wait for the caller.
                    hand_out(handle)
                    number, jobs = group
                    if not jobs:
                        continue
                    if isinstance(answers, Exception):
                        raise answers
                    for text in answers.notices:
                        self.notice(text)
                    yield jobs, answers
                    if queue.finish(group):
                        matrices.blocks.pop(number, None)
        finally:
            self._ignore_answers()

    def _queue(
        self, assignment: Assignment, blocks: Mapping[int, Sequence[Job]], size: int
    ) -> GroupQueue:
        """Return the queue of a round. If workers fold, each block of `size` slots is one group."""
        fold = assignment.exchange is not None
        groups: list[Group] = []
        for number, jobs in blocks.items():
            split = [list(jobs)] if fold else self._groups(assignment.pipeline, jobs)
            groups += [(number, group) for group in split]
        ahead = math.ceil(CLIENTS_AHEAD * self.workers / size)
        return GroupQueue(groups, blocks, BLOCKS * self.workers if fold else 1 + ahead)

    def _hand_out(
        self,
        queue: GroupQueue,
        packed_assignment: Any,
        pack_work: Callable[[Group], Any],
        handle: WorkerHandle,
    ) -> None:
        """Send the next group to a worker, unless the worker is busy."""
        group = None if handle.busy else queue.next_group()
        if group is not None:
            handle.submit(self._setup, packed_assignment, pack_work(group), group)

    def _pack_work(
        self,
        kind: Literal["train", "evaluate"],
        assignment: Assignment,
        blocks: Mapping[int, Sequence[Job]],
        matrices: ReplyMatrices,
        group: Group,
    ) -> Any:
        """Return the packed work of a group. The worker folds the replies of a whole block."""
        number, jobs = group
        uploads = any(job.slot is not None for job in jobs)
        fold = assignment.exchange is not None and uploads and len(jobs) == len(blocks[number])
        shared = self.shares_memory and not fold
        clients = tuple(
            ClientWork(job, self.store.read(job.client), matrices.rows(job.slot) if shared else {})
            for job in jobs
        )
        common = {id(rows): index for index, rows in enumerate(assignment.common)}
        return self._packed(Work(kind, clients, fold), common)

    def _collect_or_retry(
        self, handle: WorkerHandle, group: Group, queue: GroupQueue
    ) -> WorkDone | Exception | None:
        """Receive a worker's answer. None if the worker has died and its clients wait again."""
        try:
            return self._collect(handle)
        except WorkerDied as death:
            if queue.retry(group):
                return None
            _, (job,) = group
            reason = f"its {self.kind} died {ATTEMPTS} times ({death})"
            return WorkDone((Fault(job, reason, FedloomError(reason)),), ())

    def _collect(self, handle: WorkerHandle) -> WorkDone | Exception:
        """Receive a worker's answer. Remove the worker if it has died.

        Raises `WorkerDied`, or `FedloomError` if several workers in a row died during their start.
        """
        try:
            answers = handle.collect()
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

    def _ignore_answers(self) -> None:
        """Ignore the answers of busy workers. The workers finish their work."""
        for handle in self._handles:
            handle.group = None

    def _set_task(self, task: Task) -> None:
        """Prepare the setup of workers for a task. Raises `InvalidValue` if it is on a GPU."""
        if task.initial.is_cuda:
            raise InvalidValue(
                f"engine {self.name!r} needs a task on the CPU, got one on {task.initial.device}"
            )
        self.notices = []
        self._initial_notices = None
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
    """Split jobs into groups with similar total numbers of samples.

    Clients of similar sizes share a group. The largest clients are first, because small groups fill
    the gaps at the end.

    Args:
        jobs: The jobs, n in all.
        sizes: Number of samples of each client, `[n]`.
        count: Approximate number of groups.
        most: Largest number of clients in a group.

    Returns:
        Groups of jobs, none of them empty.
    """
    groups: list[list[Job]] = []
    current: list[Job] = []
    filled = 0
    remaining = int(sizes.sum())
    for index in sizes.argsort(descending=True, stable=True).tolist():
        size = int(sizes[index])
        missing = max(1, min(count, len(jobs)) - len(groups))
        if len(current) == most or (
            current and missing > 1 and filled + size / 2 > remaining / missing
        ):
            groups.append(current)
            remaining = remaining - filled
            current = []
            filled = 0
        current.append(jobs[index])
        filled += size
    return [*groups, current] if current else groups


def end_all(handles: list[WorkerHandle]) -> None:
    """End all workers and empty the list."""
    while handles:
        handles.pop().end()


def _shared_tensors(jobs: Sequence[Job]) -> tuple[Tensor, ...]:
    """Return the tensors that several clients receive."""
    counts = Counter(id(rows) for job in jobs for rows in job.inbox.values())
    by_id = {id(rows): rows for job in jobs for rows in job.inbox.values()}
    return tuple(rows for key, rows in by_id.items() if counts[key] > 1)
