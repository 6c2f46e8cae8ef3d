"""Estimates of the work of local training, and of the useful number of cores."""

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

from fedloom.common.randomness import preserved_generator, stream
from fedloom.engines.fit import require_fit
from fedloom.engines.processes.worker import VARIABLE
from fedloom.engines.rows import full_batch
from fedloom.engines.worker_life import STARTS_WORKERS
from fedloom.models.structure import copied
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

SHARED_STEP = 2e8
"""Smallest number of multiply-adds of a step that uses several PyTorch threads.

It takes about 10 ms on one core. In smaller steps, threads wait for each other, and on a busy
machine for other programs.
"""


def has_cores(task: Task) -> bool:
    """Return True if worker processes can be useful.

    This requires a task on the CPU, more than one thread, and a process that is no worker itself
    and can start some.
    """
    is_worker = multiprocessing.parent_process() is not None or VARIABLE in os.environ
    starts = STARTS_WORKERS and not is_worker
    return starts and not task.initial.is_cuda and torch.get_num_threads() > 1


def most_workers(task: Task, schedule: Schedule | None) -> int:
    """Return the largest useful number of workers: one per thread of PyTorch and per client.

    Args:
        task: The task.
        schedule: Participation, or None if all clients train in each round.

    Returns:
        Number of workers, at least 1.
    """
    clients = task.clients if schedule is None else schedule.participants(task.clients)
    return min(torch.get_num_threads(), clients)


def mean_steps(task: Task) -> float:
    """Return the mean number of a client's local steps in a round."""
    return float(task.training.local_steps(torch.from_numpy(task.partition.sizes).double()).mean())


def step_threads(task: Task) -> int:
    """Return the number of threads for a step: PyTorch's number, or one for small steps."""
    return torch.get_num_threads() if step_multiply_adds(task) >= SHARED_STEP else 1


def training_speed(task: Task, clients: int, seconds: float) -> tuple[float, float]:
    """Return the speed of training, and for comparison of a large matrix product, in GFLOP/s.

    Args:
        task: Data, model and local training.
        clients: Number of clients that trained.
        seconds: Duration of their training.

    Returns:
        The speed of training, and the speed of a matrix product on this device now.
    """
    matrix = torch.randn(2048, 2048, generator=stream(0, "speed")).to(task.initial.device)
    durations: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        durations.append(time.perf_counter() - began)
    operations = 2 * clients * mean_steps(task) * step_multiply_adds(task)
    return operations / seconds / 1e9, 2 * len(matrix) ** 3 / min(durations) / 1e9


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Set the number of PyTorch's threads inside the block. None leaves it unchanged."""
    previous = torch.get_num_threads()
    torch.set_num_threads(previous if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def step_multiply_adds(task: Task) -> int:
    """Return the number of multiply-adds of a client's step on a full batch.

    A backward pass counts as two forward passes.
    """
    require_fit(task.model, task.dataset, task.train)
    forward = multiply_adds(task.model, task.dataset.prepare(task.train.inputs[:1]))
    return 3 * full_batch(task) * forward


def multiply_adds(module: nn.Module, sample: Tensor) -> int:
    """Count the multiply-adds of matrix products and convolutions in a forward pass.

    Args:
        module: The model.
        sample: One sample, `[1, ...]`.

    Returns:
        Multiply-adds of the sample. Element-wise operations are not counted.
    """
    # With gradients and without oneDNN: fused attention and recurrent layers are not counted.
    unfused = torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
    counter = _OperationCounter()
    with preserved_generator(), unfused, counter:
        copied(module).eval()(sample.clone())
    return counter.total // 2


class _OperationCounter(TorchDispatchMode):
    """Counts operations by PyTorch's formulas.

    PyTorch's counter imports the compiler, and this import takes longer than all of PyTorch.
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
