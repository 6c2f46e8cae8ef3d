"""Compare a local step with its own products, on twelve workloads.

A plain step of PyTorch is recorded, and its matrix products, convolutions, recurrent layers and
attention are repeated with the same tensors: nothing else of the formula needs a large number of
operations. So the limit has the shapes of the model, unlike that of a large product.

    python benchmarks/products.py [--workloads mlp,cnn] [--rounds 5] [--threads 1]

- `rows_us`: microseconds of processor time of a client's step, clients one after another.
- `stacked_us`: the same with clients in lock step.
- `products_us`: the products of a step, one client after another.
- `batched_us`: the same with one batched product for all clients of a stack, the update of the
  weights included. None for models with other operations than matrix products.
- `over`: the faster engine over the faster of the two.

All figures are medians over rounds; engines and products take turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fedloom.common.device import keep_pages
from fedloom.engines.choose import make_engine
from fedloom.engines.stacked import default_chunk
from fedloom.engines.work import mean_steps
from fedloom.flat.module import FlatModule
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from outcome import tell
from rule import WORKLOADS, engines_of

aten = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default}
OTHER_PRODUCTS = {
    *(aten.bmm.default, aten.baddbmm.default, aten.convolution.default),
    *(aten.convolution_backward.default, aten.mkldnn_rnn_layer.default),
    *(aten.mkldnn_rnn_layer_backward.default,),
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
REPEATS = 20


class Recorded(TorchDispatchMode):
    """Records the products of everything that runs inside, with copies of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in MATRIX_PRODUCTS or function in OTHER_PRODUCTS:
            self.calls.append((function, *tree_map_only(Tensor, kept, (args, kwargs))))
        return function(*args, **kwargs)


def kept(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def products_of(task: Task) -> list[Call]:
    """Return the products of one step on a batch of the largest client."""
    module = copy.deepcopy(task.model).train()
    samples = task.samples(int(task.partition.sizes.argmax()))
    count = min(len(samples), task.training.batch_size or len(samples))
    inputs = task.dataset.prepare(samples[:count].inputs)
    recorded = Recorded()
    with recorded:
        F.cross_entropy(module(inputs), samples.labels[:count]).backward()
    return recorded.calls


def one_by_one(calls: list[Call]) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        for function, args, kwargs in calls:
            function(*args, **kwargs)

    return run


def batched(calls: list[Call], clients: int) -> Callable[[], None] | None:
    """Return the products of all clients at once, or None if some are no matrix products.

    A product with a transposed left factor is the gradient of a weight: it is added to a matrix, as
    an update of the weights is.
    """
    if not calls or any(function not in MATRIX_PRODUCTS for function, _, _ in calls):
        return None
    work: list[Callable[[], Tensor]] = []
    for _, args, _ in calls:
        *bias, left, right = args
        pair = stack(left, clients), stack(right, clients)
        if left.stride(0) == 1 and left.stride(1) != 1:
            updated = left.new_zeros(clients, len(left), right.shape[1])
            work.append(partial(updated.baddbmm_, *pair, alpha=-0.01))
        elif bias:
            work.append(partial(torch.baddbmm, bias[0].expand(clients, 1, -1), *pair))
        else:
            work.append(partial(torch.bmm, *pair))

    @torch.no_grad()
    def run() -> None:
        for product in work:
            product()

    return run


def stack(factor: Tensor, clients: int) -> Tensor:
    """Return copies of a factor for all clients, with the same order of its axes in memory."""
    if factor.stride(0) == 1 and factor.stride(1) != 1:
        return factor.mT.contiguous().expand(clients, -1, -1).contiguous().mT
    return factor.contiguous().expand(clients, -1, -1).contiguous()


def seconds_of(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the processor seconds of one repetition."""
    began = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - began) / repeats


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return one line of the table."""
    make, method, participation = WORKLOADS[name]
    task = make()
    schedule = Schedule(rounds + 1, participation, evaluate_every=rounds + 1)
    steps = mean_steps(task) * max(1, round(participation * task.clients))
    names = engines_of(method)
    engines = {engine: make_engine(engine, task, schedule) for engine in names}
    runs = {
        engine: Federation(build(method), task, made, schedule) for engine, made in engines.items()
    }
    calls = products_of(task)
    size = min(default_chunk(task, FlatModule(task.model, task.layout)), task.clients)
    works = {"products": (one_by_one(calls), 1), "batched": (batched(calls, size), size)}
    turns: dict[str, list[float]] = {key: [] for key in (*names, *works)}
    for _ in range(rounds + 1):
        for engine, run in runs.items():
            turns[engine].append(seconds_of(run.step, 1) / steps)
        for key, (work, clients) in works.items():
            if work is not None:
                turns[key].append(seconds_of(work) / clients)
    for made in engines.values():
        made.close()
    figures = {key: 1e6 * statistics.median(values[1:]) for key, values in turns.items() if values}
    best = min(figures[engine] for engine in names)
    limit = min(figures[key] for key in works if key in figures)
    row: dict[str, Any] = {"workload": name}
    row |= {f"{key}_us": figures.get(key) for key in ("rows", "stacked", *works)}
    row["over"] = best / limit
    print(*row.values(), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    keep_pages()
    torch.set_num_threads(arguments.threads)
    rows = [measure(name, arguments.rounds) for name in arguments.workloads.split(",")]
    tell("A local step over its own products", rows)


if __name__ == "__main__":
    main()
