"""What comes back in a round, in the order of the slots whoever answers first, and kept no longer
than the method needs it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fedloom.records import INTEGERS, Aggregate, Exchange, Replies
from fedloom.rounds.engine import Answer, Fault, FoldedBlock, Job, Result
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task


class RoundReplies:
    """The answers of a round. Each tensor is copied once, into the matrix of its block of `size`
    slots, unless the engine has put it there already; `weigh` gives the replies' weights.

    With `fold`, a block is folded when the last of its clients has answered, and its memory is free
    for the next one: only the `aggregate` remains, in which blocks are joined in their order. A
    block that was folded elsewhere is taken as it is. Without `fold`, one block holds all replies,
    made by `pools`. `exchange` is the round's record.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        slots: int,
        size: int,
        weigh: Callable[[Sequence[Answer]], Tensor],
        fold: Callable[[Replies], Aggregate] | None,
        pools: PoolFiles | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.pools, self.exchange = pools or PoolFiles(), exchange
        self.slots, self.size, self.weigh, self.fold = (
            slots,
            size if fold else max(1, slots),
            weigh,
            fold,
        )
        self.faults: list[Fault] = []
        self.bytes = 0
        self._integers: dict[int, Tensor] = {}  # by block
        self.arrived: list[Answer] = []  # without their tensors
        self.aggregate: Aggregate | None = None
        self._matrices: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)  # by block
        self._arrived: defaultdict[int, list[Answer]] = defaultdict(list)  # by block
        self._awaited = Counter(task.slot // self.size for task in jobs if task.slot is not None)
        self._turns = deque(sorted(self._awaited))  # blocks whose aggregates are to be joined
        self._folded: dict[int, Aggregate | None] = {}  # those whose turn has not come

    def collect(self, results: Iterable[Result]) -> None:
        """Take the answers as they come."""
        for result in results:
            if isinstance(result, FoldedBlock):
                self._folded[result.number] = result.aggregate
                if result.integers is not None:
                    self._integers[result.number] = result.integers
                self.bytes += result.bytes
                continue
            slot = result.job.slot
            if isinstance(result, Fault):
                self.faults.append(result)
            elif slot is not None:
                self._store(result, slot)
            if slot is not None:
                self._awaited[slot // self.size] -= 1
                if not self._awaited[slot // self.size]:
                    self._fold(slot // self.size)
        for number in [number for number, count in self._awaited.items() if count]:
            self._fold(number)  # some of its clients were never heard of
        self.faults.sort(key=_order)
        self.arrived.sort(key=_order)

    def _store(self, reply: Answer, slot: int) -> None:
        number, row = divmod(slot, self.size)
        rows = min(self.size, self.slots - number * self.size)
        matrices = self._matrices[number]
        for name, tensor in reply.tensors.items():
            if name not in matrices:
                matrix = reply.gathered.get(name)
                if matrix is None or len(matrix) != rows or matrix.dtype != tensor.dtype:
                    matrix = self.pools.empty((rows, *tensor.shape), tensor.dtype, tensor.device)
                matrices[name] = matrix
            target = matrices[name][row]
            if target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor)
            self.bytes += tensor.nbytes
        self.arrived.append(Answer(reply.job, {}, reply.metrics, samples=reply.samples))
        self._arrived[number].append(self.arrived[-1])

    def _fold(self, number: int) -> None:
        """Fold a block, unless it came folded, and join what it is the turn of."""
        if self.fold is None:
            return
        replies = self._in_order(number)
        if number in self._turns and number not in self._folded:
            if INTEGERS in replies.matrices:
                self._integers[number] = replies[INTEGERS]
                del replies.matrices[INTEGERS]
            self._folded[number] = self.fold(replies) if len(replies) else None
        while self._turns and self._turns[0] in self._folded:
            aggregate = self._folded.pop(self._turns.popleft())
            if aggregate is not None:
                self.aggregate = (
                    aggregate if self.aggregate is None else self.aggregate.joined(aggregate)
                )

    def _in_order(self, number: int) -> Replies:
        """Return the replies of a block, which is given up. The rows of slots without a reply
        become zero.
        """
        matrices = self._matrices.pop(number, {})
        arrived = sorted(self._arrived.pop(number, []), key=_order)
        slots = torch.tensor([reply.job.slot for reply in arrived], dtype=torch.int64)
        clients = torch.tensor([reply.job.client for reply in arrived], dtype=torch.int64)
        offset = number * self.size
        answered = set((slots - offset).tolist())
        for matrix in matrices.values():
            for row in set(range(len(matrix))) - answered:
                matrix[row].zero_()
        return Replies(matrices, clients, slots, self.weigh(arrived), self.exchange, offset)

    @property
    def integers(self) -> Tensor | None:
        """Return the integer buffers `[r, Z]` of the replies that were folded, None where the model
        has none.
        """
        return (
            torch.cat([rows for _, rows in sorted(self._integers.items())])
            if self._integers
            else None
        )

    def together(self) -> Replies:
        """Return all replies, where they are not folded; they are given up."""
        replies = replace(self._in_order(0), metrics=self.metrics)
        if INTEGERS in replies.matrices:
            self._integers[0] = replies[INTEGERS]
        return replies

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Figures of the clients' work by name, NaN where a client has none, once all answers are
        here.
        """
        names = sorted({name for reply in self.arrived for name in reply.metrics})
        return {
            name: torch.tensor(
                [reply.metrics.get(name, torch.nan) for reply in self.arrived], dtype=torch.float64
            )
            for name in names
        }


def weights_of(task: Task, replies: Sequence[Answer]) -> Tensor:
    """Return the weights of replies: those of their clients' tasks, or else the samples of the
    clients.
    """
    if any(reply.job.weight is not None for reply in replies):
        return torch.tensor([reply.job.weight for reply in replies], dtype=torch.float64)
    sizes = task.sizes(torch.tensor([reply.job.client for reply in replies], dtype=torch.int64))
    claimed = torch.tensor(
        [-1 if reply.samples is None else reply.samples for reply in replies], dtype=torch.int64
    )
    return torch.where(claimed < 0, sizes, claimed)


def _order(answer: Answer | Fault) -> tuple[bool, int, int]:
    task = answer.job
    return task.slot is None, task.slot or 0, task.client
