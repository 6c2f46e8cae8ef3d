"""Compare rounds of stacked clients with rounds client by client and with plain PyTorch on a GPU.

    python benchmarks/gpu.py [--device cuda] [--tasks mlp,resnet20] [--clients 10,100]
        [--rounds 5] [--autocast bfloat16]

The script also measures the share of the card's peak. The engines run in turn in one process, round
by round; the first round of each is a warm-up.

- `over_rows`: median over rounds of engine over rows, in the same round.
- `plain`: the same steps of one client after another in a loop of plain PyTorch.
- `samples_per_s`: training samples per second.
- `share_of_peak`: operations of products and convolutions per second, forward and backward, over a
  product of two large matrices on the same device, in the same run and type. Torch's counter gives
  the operations of one step.

The last lines are rounds of FedMR on ResNet-20: 10 clients with 500 samples each, 5 epochs, batches
of 50. `--device cpu --clients 2 --samples 20 --matrix 256` is a short trial.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from engines import TASKS, resnet_task
from fedloom.common.device import find_device, keep_pages
from fedloom.common.errors import InvalidValue
from fedloom.engines.choose import make_engine
from fedloom.flat.vmap_modes import autocast
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from outcome import tell

ENGINES = ("rows", "stacked")
REPEATS = 10


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device has finished the work."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def peak(device: torch.device, size: int, autocast: str) -> float:
    """Return operations per second of the product of two square matrices, the best of several."""
    kind = torch.float32 if autocast == "none" else torch.bfloat16
    matrix, factor = (torch.ones(size, size, device=device, dtype=kind) for _ in range(2))
    return 2 * size**3 / min(seconds_of(lambda: matrix @ factor, device) for _ in range(REPEATS))


def operations_a_sample(task: Task) -> float:
    """Return operations per sample of a step's products and convolutions, forward and backward."""
    module = copy.deepcopy(task.model).train()
    count = min(len(task.train), task.training.batch_size or len(task.train))
    samples = task.train[:count]
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(module(task.dataset.prepare(samples.inputs)), samples.labels).backward()
    return float(counter.get_total_flops()) / count


def plain_round(module: nn.Module, task: Task, start: Tensor) -> None:
    """Train all clients one after another on one module with one optimizer of torch."""
    settings = task.training
    optimizer = torch.optim.SGD(
        module.parameters(), lr=settings.learning_rate, momentum=settings.momentum
    )
    for client in range(task.clients):
        task.layout.load(module, start)
        optimizer.state.clear()
        samples = task.samples(client)
        size = settings.batch_size or len(samples)
        for _ in range(settings.epochs):
            order = torch.randperm(len(samples), device=samples.labels.device)
            for index in order.split(size):
                optimizer.zero_grad()
                with autocast(settings.autocast_dtype, start.device):
                    outputs = module(task.dataset.prepare(samples.inputs[index]))
                    loss = F.cross_entropy(outputs, samples.labels[index])
                loss.backward()
                optimizer.step()


def measure(
    name: str, method: str, task: Task, rounds: int, peak_rate: float
) -> list[dict[str, Any]]:
    """Print one line for each engine. All clients take part in every round, without evaluation."""
    schedule = Schedule(rounds=rounds + 9, participation=1.0, evaluate_every=rounds + 9)
    runs = {
        engine: Federation(build(method), task, make_engine(engine, task), schedule)
        for engine in ENGINES
    }
    works: dict[str, Callable[[], object]] = {engine: run.step for engine, run in runs.items()}
    works["plain"] = partial(plain_round, copy.deepcopy(task.model).train(), task, task.initial)
    taken: dict[str, list[float]] = {engine: [] for engine in works}
    for _ in range(rounds + 1):
        for engine, work in works.items():
            taken[engine].append(seconds_of(work, task.initial.device))
    samples = int(task.partition.sizes.sum()) * task.training.epochs
    needed = operations_a_sample(task) * samples
    lines = []
    for engine in works:
        faults = [] if engine == "plain" else [r["faults"] for r in runs[engine].history]
        seconds = statistics.median(taken[engine][1:])
        pairs = zip(taken[engine][1:], taken["rows"][1:], strict=True)
        lines.append({
            "task": name,
            "method": method,
            "clients": task.clients,
            "engine": engine,
            "round_s": seconds,
            "samples_per_s": samples / seconds,
            "share_of_peak": needed / seconds / peak_rate,
            "over_rows": statistics.median(ours / rows for ours, rows in pairs),
            "faults": sum(map(len, faults)),
        })  # fmt: skip
    for run in runs.values():
        run.engine.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--clients", default="10,100")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--autocast", default="none", choices=["none", "bfloat16"])
    parser.add_argument(
        "--samples", type=int, help="of each client, in place of the tasks' own numbers"
    )
    parser.add_argument(
        "--matrix", type=int, default=8192, help="rows of the matrices whose product is the peak"
    )
    arguments = parser.parse_args()
    keep_pages()
    try:
        device = find_device(arguments.device)
    except InvalidValue as error:
        parser.error(str(error))
    rate = peak(device, arguments.matrix, arguments.autocast)
    sized = {} if arguments.samples is None else {"samples": arguments.samples}

    def placed(task: Task, **training: Any) -> Task:
        return replace(
            task, training=replace(task.training, autocast=arguments.autocast, **training)
        ).to(device)

    rows = []
    for name in arguments.tasks.split(","):
        for clients in map(int, arguments.clients.split(",")):
            task = TASKS[name](clients, **({} if name == "logistic" else sized))
            rows += measure(name, "fedavg", placed(task), arguments.rounds, rate)
    count = min(10, max(map(int, arguments.clients.split(","))))
    task = placed(resnet_task(count, **{"samples": 500, **sized}), epochs=5)
    rows += measure("resnet20", "fedmr", task, arguments.rounds, rate)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    tell(f"stacked over rows on {named}, {rate / 1e12:.3g} Tflop/s at most", rows)


if __name__ == "__main__":
    main()
