"""Work of a task's steps, and the cores that it is worth."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedloom.engines.fit import require_fit
from fedloom.engines.processes.worker import VARIABLE
from fedloom.engines.rows import full_batch
from fedloom.models.structure import copied
from fedloom.randomness import preserved_generator, stream
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

SHARED_STEP = 2e8
"""Multiply-adds of a client's step from which it pays to share it among PyTorch's threads: about 10
ms of one core. In smaller steps threads wait for each other, and on a busy machine for whatever has
their core.
"""


def has_cores(task: Task) -> bool:
    """Return True if worker processes can pay: on a CPU with more than one thread, outside a worker
    process.
    """
    is_worker = multiprocessing.parent_process() is not None or VARIABLE in os.environ
    return not task.initial.is_cuda and torch.get_num_threads() > 1 and not is_worker


def most_workers(task: Task, schedule: Schedule | None) -> int:
    """Return a worker for each thread of PyTorch, but no more than there are clients in a round."""
    return min(
        torch.get_num_threads(),
        task.clients if schedule is None else schedule.participants(task.clients),
    )


def mean_steps(task: Task) -> float:
    """Return the mean number of a client's local steps in a round."""
    return float(task.training.local_steps(torch.from_numpy(task.partition.sizes).double()).mean())


def step_threads(task: Task) -> int:
    """Return the threads that a client's step is worth: PyTorch's number from `SHARED_STEP`
    multiply-adds on, else one.
    """
    return torch.get_num_threads() if step_multiply_adds(task) >= SHARED_STEP else 1


def training_speed(task: Task, clients: int, seconds: float) -> tuple[float, float]:
    """Return the GFLOP/s of so many clients' training in a round, and those of a large matrix
    product on this device now.
    """
    matrix, durations = (
        torch.randn(2048, 2048, generator=stream(0, "speed")).to(task.initial.device),
        [],
    )
    for _ in range(5):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        durations.append(time.perf_counter() - began)
    operations = 2 * clients * mean_steps(task) * step_multiply_adds(task)
    return operations / seconds / 1e9, 2 * len(matrix) ** 3 / min(durations) / 1e9


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Compute with so many threads inside the block (None: with the present number)."""
    present = torch.get_num_threads()
    torch.set_num_threads(present if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(present)


def step_multiply_adds(task: Task) -> int:
    """Count the multiply-adds of a client's step on a full batch: the forward pass, and twice as
    many in the backward pass.
    """
    require_fit(task.model, task.dataset, task.train)
    return (
        3
        * full_batch(task)
        * multiply_adds(task.model, task.dataset.prepare(task.train.inputs[:1]))
    )


def multiply_adds(module: nn.Module, sample: Tensor) -> int:
    """Count the multiply-adds of matrix products and convolutions in a forward pass of `sample [1,
    ...]`.
    """
    # With gradients and without oneDNN, since fused attention and recurrent layers would not be
    # counted.
    plain, counter = (
        torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
        _OperationCounter(),
    )
    with preserved_generator(), plain, counter:
        copied(module).eval()(sample.clone())
    return counter.total // 2


class _OperationCounter(TorchDispatchMode):
    """Count of operations by PyTorch's formulas. Its own counter imports the compiler, which takes
    longer than all of PyTorch.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        self.total += (
            0 if formula is None else int(formula(*args, **(kwargs or {}), out_val=result))
        )
        return result
