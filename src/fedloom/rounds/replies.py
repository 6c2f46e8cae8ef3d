"""Collects client replies by slot, independent of the order of arrival.

Replies are folded and discarded as soon as the method allows it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fedloom.algorithm.records import INTEGERS, Aggregate, Exchange, Replies
from fedloom.rounds.engine import Answer, Fault, FoldedBlock, Job, Result
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task


class RoundReplies:
    """The replies of a round.

    Each tensor is copied once, into the matrix of its block of slots, unless the engine has already
    stored it there. With `fold`, a block is folded when its last client has answered, and its
    memory becomes free. Only the aggregate remains, in which blocks are joined in order of their
    numbers. Without `fold`, one block contains all replies.

    Args:
        jobs: Jobs of the round.
        slots: Number of slots of the round.
        size: Number of slots in a block.
        weigh: Returns the weights of replies, `[n]`.
        fold: Folds the replies of a block, or None.
        pools: Allocates the matrices. By default they are in memory.
        exchange: Record of the round.
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
        self.pools = pools or PoolFiles()
        self.exchange = exchange
        self.slots = slots
        self.size = size if fold else max(1, slots)
        self.weigh = weigh
        self.fold = fold
        self.faults: list[Fault] = []
        self.bytes = 0
        self._integers: dict[int, Tensor] = {}  # by block
        self.arrived: list[Answer] = []  # without tensors
        self.aggregate: Aggregate | None = None
        self._matrices: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)  # by block
        self._arrived: defaultdict[int, list[Answer]] = defaultdict(list)  # by block
        self._awaited = Counter(job.slot // self.size for job in jobs if job.slot is not None)
        self._to_join = deque(sorted(self._awaited))  # blocks that `aggregate` does not include yet
        self._folded: dict[int, Aggregate | None] = {}  # blocks that wait for earlier blocks

    def collect(self, results: Iterable[Result]) -> None:
        """Store the answers of the engine. Fold each block after its last answer."""
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
            self._fold(number)  # some of its clients neither answered nor failed
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
        """Fold a block unless the engine has folded it, then join the next blocks in order."""
        if self.fold is None:
            return
        replies = self._in_order(number)
        if number in self._to_join and number not in self._folded:
            if INTEGERS in replies.matrices:
                self._integers[number] = replies[INTEGERS]
                del replies.matrices[INTEGERS]
            self._folded[number] = self.fold(replies) if len(replies) else None
        while self._to_join and self._to_join[0] in self._folded:
            aggregate = self._folded.pop(self._to_join.popleft())
            if aggregate is None:
                continue
            if self.aggregate is None:
                self.aggregate = aggregate
            else:
                self.aggregate = self.aggregate.joined(aggregate)

    def _in_order(self, number: int) -> Replies:
        """Remove a block and return its replies by slot. Rows without a reply become zero."""
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
        """Integer buffers of the replies, `[r, Z]`. None if the model has none."""
        if not self._integers:
            return None
        return torch.cat([rows for _, rows in sorted(self._integers.items())])

    def all_replies(self) -> Replies:
        """Remove and return all replies. Only for replies that are not folded."""
        replies = replace(self._in_order(0), metrics=self.metrics)
        if INTEGERS in replies.matrices:
            self._integers[0] = replies[INTEGERS]
        return replies

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Figures of the clients' training by name, `[r]`. NaN for clients without the figure.

        Read them only after `collect`.
        """
        names = sorted({name for reply in self.arrived for name in reply.metrics})
        return {
            name: torch.tensor(
                [reply.metrics.get(name, torch.nan) for reply in self.arrived], dtype=torch.float64
            )
            for name in names
        }


def weights_of(task: Task, replies: Sequence[Answer]) -> Tensor:
    """Return the weights of replies.

    Args:
        task: The task, with the number of samples of each client.
        replies: Replies of the clients. Sample counts in replies replace the counts of the task.

    Returns:
        The weights in the jobs if any job has one, otherwise the number of samples, `[n]`.
    """
    if any(reply.job.weight is not None for reply in replies):
        return torch.tensor([reply.job.weight for reply in replies], dtype=torch.float64)
    sizes = task.sizes(torch.tensor([reply.job.client for reply in replies], dtype=torch.int64))
    claimed = torch.tensor(
        [-1 if reply.samples is None else reply.samples for reply in replies], dtype=torch.int64
    )
    return torch.where(claimed < 0, sizes, claimed)


def _order(answer: Answer | Fault) -> tuple[bool, int, int]:
    job = answer.job
    return job.slot is None, job.slot or 0, job.client


MEDIANS = 4
"""Largest ratio of a capped weight to the median of all claims (`capped`)."""


def capped(weights: Tensor, share: float) -> Tensor:
    """Cap claimed weights, so that few clients cannot dominate a mean by large claims.

    A weight is at most `MEDIANS` times the (lower) median of the claims above 0, and at most
    `share` of the sum. Larger claims are lowered to one common value. If even equal weights exceed
    this share, all weights are equal. Then f < n / 2 false claims among n claims have at most
    4 f / (3 f + floor(n / 2) + 1) of the sum, whatever the other claims are.

    Args:
        weights: Claimed weights, `[k]`, at least 0.
        share: Largest share of the sum, in (0, 1]. 1 accepts all claims.

    Returns:
        Weights `[k]`: the unchanged claims if none is lowered, otherwise float64.
    """
    if share >= 1 or not bool((weights > 0).any()):
        return weights
    limit = MEDIANS * weights[weights > 0].median()
    if bool((weights > limit).any()):
        weights = weights.double().clamp(max=float(limit))
    largest_first = weights.double().sort(descending=True).values
    for count in range(len(largest_first)):
        if count * share >= 1:
            break
        # If the `count` largest weights are lowered to this value, each has exactly its share:
        # share * (count * value + sum of the other weights) = value.
        value = share * largest_first[count:].sum() / (1 - count * share)
        if largest_first[count] <= value:
            return weights if count == 0 else weights.double().clamp(max=value)
    return torch.ones_like(largest_first)
