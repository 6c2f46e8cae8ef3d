"""Compare two other ways to train many small models with the engines.

The first way trains one client after another in one compiled loop, with the weights in the cache.
The second puts the clients of several runs in one stack.

    pip install numba          # not a dependency of fedloom
    python benchmarks/alternatives.py [--only loop|together] [--turns 9]

`loop`: microseconds per SGD step of one client. Numba compiles the loop over all steps of a client.
BLAS computes the products and includes the update, as in the stacks. `k=10` are steps of the stacks
for ten clients. `apart` is the largest difference between the models; it exceeds rounding where the
sign of a ReLU input changes.

`together`: milliseconds of processor time per round and participating client, with 10 clients (one
run), 30 and 70 (seven runs in one stack, at best).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedloom.data import Dataset, Samples
from fedloom.engines.stacked import StackedEngine
from fedloom.flat.linear_chain import FoldedSGD, linear_layers
from fedloom.flat.module import Batch
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation, Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import tell

RATE = 0.05
LOOPS = [(784, 200, 10, 60), (784, 200, 50, 12), (64, 64, 10, 6)]
"""Features, width of both hidden layers, batch, steps of a client."""
STACKS = [(64, 64, 50, 5), (64, 128, 10, 5), (784, 200, 10, 1)]
"""Features, width of both hidden layers, batch, epochs."""


def noise(clients: int, samples: int, features: int, width: int, **training: Any) -> Task:
    """Return a task of `clients` clients with noise as samples."""
    draw = torch.Generator().manual_seed(0)
    train = Samples(
        torch.rand(clients * samples, features, generator=draw),
        torch.arange(clients * samples) % 10,
    )
    data = Dataset("noise", train, train[:360], 10)
    model = f"mlp(hidden=[{width}, {width}])"
    return make_task(
        data,
        clients=clients,
        partition="iid",
        model=model,
        training={"learning_rate": RATE, **training},
    )


def compiled() -> Callable[..., None]:
    """Return the compiled function of all steps of one client.

    Its arguments are weights and biases of three layers (changed in place), inputs `[n, features]`,
    labels and batch.
    """
    import numba  # type: ignore[import-not-found]
    from numba.extending import get_cython_function_address  # type: ignore[import-not-found]

    pointer = ctypes.c_void_p
    sgemm = ctypes.CFUNCTYPE(None, *[pointer] * 13)(
        get_cython_function_address("scipy.linalg.cython_blas", "sgemm")
    )
    njit: Any = numba.njit(fastmath=True)
    N, T = ord("N"), ord("T")

    def plain_product(ta: int, tb: int, m: int, n: int, k: int, alpha: float, a: Any, lda: int, b: Any, ldb: int, beta: float,
                c: Any, ldc: int) -> None:  # fmt: skip
        """Compute C[m, n] = alpha op(A) op(B) + beta C, column by column as in Fortran."""
        integers, real = np.empty(8, np.int32), np.empty(2, np.float32)
        (
            integers[0],
            integers[1],
            integers[2],
            integers[3],
            integers[4],
            integers[5],
            integers[6],
            integers[7],
        ) = (
            ta,
            tb,
            m,
            n,
            k,
            lda,
            ldb,
            ldc,
        )
        real[0], real[1] = alpha, beta
        p, q = integers.ctypes.data, real.ctypes.data
        sgemm(
            p,
            p + 4,
            p + 8,
            p + 12,
            p + 16,
            q,
            a.ctypes.data,
            p + 20,
            b.ctypes.data,
            p + 24,
            q + 4,
            c.ctypes.data,
            p + 28,
        )

    product = njit(plain_product)

    def steps(
        w1: Any, b1: Any, w2: Any, b2: Any, w3: Any, b3: Any, inputs: Any, labels: Any, batch: int
    ) -> None:
        features, wide, classes = inputs.shape[1], len(b1), len(b3)
        h, g, o = (
            np.empty((batch, wide), np.float32),
            np.empty((batch, wide), np.float32),
            np.empty((batch, classes), np.float32),
        )
        dh, dg = np.empty_like(h), np.empty_like(g)
        for start in range(0, len(inputs), batch):
            x, y = inputs[start : start + batch], labels[start : start + batch]
            for r in range(batch):
                h[r], g[r], o[r] = b1, b2, b3
            product(T, N, wide, batch, features, 1.0, w1, features, x, features, 1.0, h, wide)
            for r in range(batch):
                for j in range(wide):
                    h[r, j] = max(h[r, j], 0)
            product(T, N, wide, batch, wide, 1.0, w2, wide, h, wide, 1.0, g, wide)
            for r in range(batch):
                for j in range(wide):
                    g[r, j] = max(g[r, j], 0)
            product(T, N, classes, batch, wide, 1.0, w3, wide, g, wide, 1.0, o, classes)
            for r in range(batch):
                o[r] = np.exp(o[r] - o[r].max())
                o[r] /= o[r].sum() * batch
                o[r, y[r]] -= np.float32(1) / batch
            product(N, N, wide, batch, classes, 1.0, w3, wide, o, classes, 0.0, dg, wide)
            product(N, T, wide, classes, batch, -RATE, g, wide, o, classes, 1.0, w3, wide)
            for r in range(batch):
                for j in range(wide):
                    dg[r, j] = dg[r, j] if g[r, j] > 0 else 0
            product(N, N, wide, batch, wide, 1.0, w2, wide, dg, wide, 0.0, dh, wide)
            product(N, T, wide, wide, batch, -RATE, h, wide, dg, wide, 1.0, w2, wide)
            for r in range(batch):
                for j in range(wide):
                    dh[r, j] = dh[r, j] if h[r, j] > 0 else 0
            product(N, T, features, wide, batch, -RATE, x, features, dh, wide, 1.0, w1, features)
            for r in range(batch):
                for j in range(wide):
                    b1[j] -= RATE * dh[r, j]
                    b2[j] -= RATE * dg[r, j]
                for j in range(classes):
                    b3[j] -= RATE * o[r, j]

    compiled_steps: Callable[..., None] = njit(steps)
    return compiled_steps


def loop(features: int, width: int, batch: int, steps: int, turns: int) -> dict[str, Any]:
    """Measure the compiled loop and the steps of stacks, for ten clients."""
    clients, samples = 10, batch * steps
    task = noise(clients, samples, features, width, batch_size=batch)
    folded, compiled_loop = (
        FoldedSGD(linear_layers(task.model, task.layout), task.training, RATE),
        compiled(),
    )
    inputs, labels = (
        task.train.inputs.view(clients, samples, -1),
        task.train.labels.view(clients, samples),
    )
    results: dict[str, torch.Tensor] = {}

    def stacked(k: int) -> None:
        trained = []
        for client in range(0, clients, k):
            rows, cohort = task.initial.repeat(k, 1), slice(client, client + k)
            step = folded(rows, None)
            for start in range(0, samples, batch):
                window = slice(start, start + batch)
                step(Batch(inputs[cohort, window], labels[cohort, window], start))
            trained.append(rows)
        results[f"k={k}"] = torch.cat(trained)

    def one_by_one() -> None:
        rows = task.initial.repeat(clients, 1)
        for row, x, y in zip(rows, inputs, labels, strict=True):
            compiled_loop(
                *(tensor.numpy() for tensor in task.layout.tensors(row).values()),
                x.numpy(),
                y.numpy(),
                batch,
            )
        results["loop"] = rows

    ways: dict[str, Callable[[], None]] = {
        "loop": one_by_one, "k=1": lambda: stacked(1), "k=2": lambda: stacked(2), "k=10": lambda: stacked(10),
    }  # fmt: skip
    one_by_one()  # compiled by now
    microseconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            microseconds[name].append(1e6 * (time.perf_counter() - began) / (clients * steps))
    off = float((results["loop"] - results["k=10"]).abs().max())
    least = {name: round(min(times), 1) for name, times in microseconds.items()}
    return {"features": features, "width": width, "batch": batch, **least, "apart": off}


def rounds_in_stacks(
    features: int, width: int, batch: int, epochs: int, turns: int
) -> dict[str, Any]:
    """Measure rounds of 10, 30 and 70 clients in stacks."""
    schedule = Schedule(10**4, 0.5, evaluate_every=10**4)
    runs = {}
    for clients in (10, 30, 70):
        task = noise(2 * clients, 72, features, width, batch_size=batch, epochs=epochs)
        runs[clients] = Federation(build("fedavg"), task, StackedEngine(task), schedule)
        runs[clients].step()
    milliseconds: dict[int, list[float]] = {clients: [] for clients in runs}
    for _ in range(turns):
        for clients, run in runs.items():
            began = time.process_time()
            run.step()
            milliseconds[clients].append(1e3 * (time.process_time() - began) / clients)
    medians = {str(clients): statistics.median(times) for clients, times in milliseconds.items()}
    return {
        "features": features,
        "width": width,
        "batch": batch,
        **medians,
        "at_best": medians["10"] / medians["70"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("loop", "together"))
    parser.add_argument("--turns", type=int, default=9)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.only != "together":
        tell(
            "microseconds of a client's step, least of the turns",
            [loop(*case, chosen.turns) for case in LOOPS],
        )
    if chosen.only != "loop":
        rows = [rounds_in_stacks(*case, chosen.turns) for case in STACKS]
        tell("milliseconds a client and round, by the clients that take part", rows)


if __name__ == "__main__":
    main()
