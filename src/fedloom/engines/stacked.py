"""The stacked engine: clients advance together, many models in one batched step."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from fedloom.config.fields import Count, checked
from fedloom.engines.base import engines
from fedloom.engines.proof import Proof
from fedloom.engines.rows import RowsEngine, T, full_batch
from fedloom.errors import FedloomError, error_text
from fedloom.flat.module import Batch, FlatModule, data_loss
from fedloom.flat.stacked_module import StackedModule
from fedloom.method import Method
from fedloom.parts.pipeline import Pipeline
from fedloom.randomness import preserved_generator
from fedloom.round import Round
from fedloom.rounds.engine import Job
from fedloom.state.store import BUDGET
from fedloom.task import Task

STACK_VALUES = 1 << 21
"""Weights of one stack on a CPU: ten models of 200,000. Larger stacks leave the caches and get
slower.
"""

SHARE_OF_MEMORY = 0.6
"""Share of an accelerator's free memory that stacks may take."""

ROWS_HELD = 8
"""Rows of P numbers that a model in training may need: download, weights, velocity, gradient and
those of a method.
"""


@engines.register("stacked")
class StackedEngine(RowsEngine):
    """Trains clients in lock step, with the numbers of the rows engine to float tolerance.

    Clients of similar sizes share a chunk, so that few stand still. If models of the task or a
    method's clients cannot be stacked, clients train one after another, and a notice says why.

    Args:
        chunk: Models that advance together; by default as many as the processor's caches or an
            accelerator's free memory hold.
    """

    stacks = True

    def __init__(
        self,
        task: Task,
        proof: Proof | None = None,
        *,
        memory_budget: int = BUDGET,
        chunk: Count | None = None,
    ) -> None:
        super().__init__(task, proof, memory_budget=memory_budget)
        checked(StackedEngine, {"chunk": chunk})
        self.stack = StackedModule(*self.ways)
        self.chunk = chunk or default_chunk(task, self.flat_module)
        if self.proof.unstackable:
            reason = f"models of this kind cannot be stacked: {self.proof.unstackable}"
            self.notice(f"clients train one by one, since {reason}")

    def begin(self, task: Task, directory: Path | None) -> None:
        super().begin(task, directory)
        self.stack.autocast = task.training.autocast_dtype

    def _results(
        self, pipeline: Pipeline, jobs: Sequence[Job], work: Callable[[Sequence[Job]], list[T]]
    ) -> Iterator[T]:
        waiting = deque(self._chunks(pipeline, jobs))
        while waiting:
            chunk = waiting.popleft()
            if len(chunk) == 1:
                yield from work(chunk)
                continue
            try:
                results = work(chunk)
            except FedloomError:
                raise  # a mistake in the configuration is not the clients' fault
            except torch.OutOfMemoryError:
                size = self.chunk = max(1, len(chunk) // 2)
                self.notice(
                    f"a stack of {len(chunk)} models does not fit in memory: {size} train together from now on"
                )
            except Exception as error:
                # One client's failure must not fail the chunk: each works by itself, with the same
                # result.
                size = 1
                self.notice(
                    f"{pipeline}: clients train one by one where they fail in lock step: {error_text(error)}"
                )
            else:
                yield from results
                continue
            waiting.extendleft(
                reversed([chunk[start : start + size] for start in range(0, len(chunk), size)])
            )

    def _chunks(self, pipeline: Pipeline, jobs: Sequence[Job]) -> list[Sequence[Job]]:
        """Return the clients in chunks of about equal length, largest first; one by one if they
        cannot be stacked.
        """
        reason = unstackable_method(pipeline.components())
        if reason:
            self.notice(f"{pipeline}: {reason}")
        size = 1 if reason or self.proof.unstackable else self.chunk
        clients = torch.tensor([job.client for job in jobs], dtype=torch.int64)
        falling = self.task.sizes(clients).argsort(descending=True, stable=True).tolist()
        count = math.ceil(len(jobs) / size)
        edges = [index * len(jobs) // max(1, count) for index in range(count + 1)]
        return [[jobs[k] for k in falling[a:b]] for a, b in pairwise(edges)]

    def _module(self, round: Round, clients: Sequence[int]) -> FlatModule:
        if len(clients) == 1:
            return self.flat_module
        drawing = clients if self.proof.draws else ()
        self.stack.begin(len(clients), [round.stream("layers", client) for client in drawing])
        return self.stack


def unstackable_method(methods: Iterable[Method]) -> str | None:
    """Return the reason why clients of these methods train one at a time, or None if they may
    advance together.
    """
    for method in methods:
        if not method.facts.stackable:
            return f"{type(method).__name__} trains one client at a time"
    return None


@torch.enable_grad()
def default_chunk(task: Task, flat_module: FlatModule) -> int:
    """Return how many models fit the processor's caches, or an accelerator's free memory."""
    if task.initial.is_cuda:
        free, _ = torch.cuda.mem_get_info(task.initial.device)
        return max(1, int(SHARE_OF_MEMORY * free / bytes_of_training(task, flat_module)))
    frozen = sum(tensor.numel() for tensor in task.layout.frozen_tensors(task.model).values())
    return max(4, min(64, STACK_VALUES // (task.layout.size + frozen)))


def bytes_of_training(task: Task, flat_module: FlatModule) -> int:
    """Return the bytes that one model needs while it trains: its rows, and what a forward pass
    saves (measured).
    """
    count = 2 if flat_module.needs_pairs else 1
    samples = task.train[:count]
    saved: dict[int, int] = {}
    frozen = {tensor.data_ptr() for tensor in task.layout.frozen_tensors(task.model).values()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in frozen:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    row = task.initial.clone().unsqueeze(0)
    batch = Batch(task.dataset.prepare(samples.inputs).unsqueeze(0), samples.labels.unsqueeze(0))
    with (
        preserved_generator(row.device),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        flat_module.gradient(row, batch, data_loss, {})
    weights = task.layout.size * row.element_size()
    activations = (
        max(0, sum(saved.values()) - weights) // count
        + batch.inputs[0, 0].numel() * row.element_size()
    )
    return ROWS_HELD * weights + 2 * full_batch(task) * activations
