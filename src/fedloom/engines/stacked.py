"""The stacked engine: many clients train in lock step, with one batched step for all models."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from fedloom.algorithm.method import Method
from fedloom.common.errors import FedloomError, error_text
from fedloom.common.fields import Count, checked
from fedloom.common.randomness import preserved_generator
from fedloom.common.round import Round
from fedloom.engines.base import engines
from fedloom.engines.proof import Proof
from fedloom.engines.rows import RowsEngine, T, full_batch
from fedloom.flat.module import Batch, FlatModule, data_loss
from fedloom.flat.stacked_module import StackedModule
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Job
from fedloom.state.store import BUDGET
from fedloom.task import Task

STACK_VALUES = 1 << 20
"""Number of weights in one stack on a CPU, such as five models of 200,000 weights.

Larger stacks do not fit into the caches: ten such models take 1.2 times as long per model.
"""

SHARE_OF_MEMORY = 0.6
"""Share of an accelerator's free memory that stacks may use."""

ROWS_HELD = 8
"""Number of rows, `[P]`, that one training model may need.

They are the download, weights, velocity, gradient, and tensors of the method.
"""


@engines.register("stacked")
class StackedEngine(RowsEngine):
    """Trains clients in lock step. Results are equal to the rows engine to float tolerance.

    Clients of similar sizes share a chunk, so that few clients wait for others. If models of the
    task or clients of the method cannot be stacked, clients train one after another, and a notice
    gives the reason.

    Args:
        task: Data, model and local training.
        proof: Shortcuts that the task allows, if they were proven before.
        memory_budget: Bytes of client memory in this process.
        chunk: Number of models that train in lock step. By default the number that fits into the
            processor's caches, or into an accelerator's free memory.
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
        self.stack = StackedModule(*self._module_arguments)
        self.chunk = chunk or default_chunk(task, self.flat_module)
        if self.proof.unstackable:
            reason = f"models of this kind cannot be stacked: {self.proof.unstackable}"
            self.notice(f"clients train one by one, because {reason}")

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
                raise  # a mistake in the configuration: it would occur in every client
            except torch.OutOfMemoryError:
                size = self.chunk = max(1, len(chunk) // 2)
                self.notice(
                    f"a stack of {len(chunk)} models does not fit in memory: from now on, stacks "
                    f"have {size} models"
                )
            except Exception as error:
                # One client's failure must not fail the chunk: repeat it client by client. Other
                # clients get the same results.
                size = 1
                self.notice(
                    f"{pipeline}: clients that fail in lock step train one by one: "
                    f"{error_text(error)}"
                )
            else:
                yield from results
                continue
            waiting.extendleft(
                reversed([chunk[start : start + size] for start in range(0, len(chunk), size)])
            )

    def _chunks(self, pipeline: Pipeline, jobs: Sequence[Job]) -> list[Sequence[Job]]:
        """Split the clients into chunks of similar lengths, with the largest clients first.

        Chunks have one client if models or methods cannot be stacked.
        """
        reason = unstackable_method(pipeline.components())
        if reason:
            self.notice(f"{pipeline}: {reason}")
        size = 1 if reason or self.proof.unstackable else self.chunk
        clients = torch.tensor([job.client for job in jobs], dtype=torch.int64)
        largest_first = self.task.sizes(clients).argsort(descending=True, stable=True).tolist()
        count = math.ceil(len(jobs) / size)
        edges = [index * len(jobs) // max(1, count) for index in range(count + 1)]
        return [[jobs[k] for k in largest_first[a:b]] for a, b in pairwise(edges)]

    def _module(self, round: Round, clients: Sequence[int]) -> FlatModule:
        if len(clients) == 1:
            return self.flat_module
        drawing = clients if self.proof.draws else ()
        self.stack.begin(len(clients), [round.stream("layers", client) for client in drawing])
        return self.stack


def unstackable_method(methods: Iterable[Method]) -> str | None:
    """Return the reason why clients of these methods cannot train in lock step, or None."""
    for method in methods:
        if not method.facts.stackable:
            return f"{type(method).__name__} trains one client at a time"
    return None


@torch.enable_grad()
def default_chunk(task: Task, flat_module: FlatModule) -> int:
    """Return the number of models that fit into the CPU's caches or the GPU's free memory.

    Args:
        task: Data, model and local training.
        flat_module: The task's module, with which memory is measured on a GPU.

    Returns:
        Number of models, at least 1; on the CPU from 4 to 64.
    """
    if task.initial.is_cuda:
        free, _ = torch.cuda.mem_get_info(task.initial.device)
        return max(1, int(SHARE_OF_MEMORY * free / bytes_of_training(task, flat_module)))
    frozen = sum(tensor.numel() for tensor in task.layout.frozen_tensors(task.model).values())
    return max(4, min(64, STACK_VALUES // (task.layout.size + frozen)))


def bytes_of_training(task: Task, flat_module: FlatModule) -> int:
    """Return the memory of one training model in bytes.

    It needs `ROWS_HELD` rows and the activations that autograd saves. The function runs a forward
    and backward pass to measure the activations.

    Args:
        task: Data, model and local training.
        flat_module: The task's module.

    Returns:
        Bytes, for a full batch.
    """
    count = 2 if flat_module.needs_pairs else 1
    samples = task.train[:count]
    saved: dict[int, int] = {}
    frozen = {tensor.data_ptr() for tensor in task.layout.frozen_tensors(task.model).values()}

    def record(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in frozen:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    row = task.initial.clone().unsqueeze(0)
    batch = Batch(task.dataset.prepare(samples.inputs).unsqueeze(0), samples.labels.unsqueeze(0))
    with (
        preserved_generator(row.device),
        torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor),
    ):
        flat_module.gradient(row, batch, data_loss, {})
    weights = task.layout.size * row.element_size()
    activations = (
        max(0, sum(saved.values()) - weights) // count
        + batch.inputs[0, 0].numel() * row.element_size()
    )
    return ROWS_HELD * weights + 2 * full_batch(task) * activations
