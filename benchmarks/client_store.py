"""Store personal models of many clients in little memory.

The script measures peak memory and the cost of the store over plain copies and files. Every client
of the federation keeps its own model. Rounds go through all clients in turn, `--turns` times. The
clients' models together are much larger than the budget, so the store writes them to disk. Then a
new store resumes the run, every model is checked, and the store's operations are timed. The full
claim, 1,000 ResNet-18 in 4 GiB, needs some 60 GB of disk (`--clients 1000 --turns 1`). The default
shows the same in little time.

    python benchmarks/client_store.py [--clients 100] [--model wide|resnet18] [--budget-mb 400]
        [--participants 10] [--turns 2]
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedloom.algorithm.method import Facts
from fedloom.algorithm.records import Message, Selection
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.round import Round
from fedloom.data import Dataset, Partition, Samples
from fedloom.engines.rows import RowsEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part
from fedloom.rounds.checkpoint import Checkpoints
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.state.files import flush
from fedloom.state.store import ClientStore, Memory
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import tell


@dataclass
class PersonalModels(FedAvg):
    """Clients store their trained model and continue from its mean with the download."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        stored = cohort.memory.knows("model").unsqueeze(1)
        visits = cohort.memory.get("seen", torch.zeros(1, 1, dtype=torch.int64))
        kept_model = cohort.memory.get("model", inbox["model"])
        trained = cohort.fit(
            torch.where(stored, (kept_model + inbox["model"]) / 2, inbox["model"])
        ).model
        cohort.memory["model"] = trained
        cohort.memory["seen"] = visits + 1
        return {"model": trained}


class InTurn(Part):
    """Clients take part in turn."""

    facts = Facts(independent=False)

    def select(self, round: Round, inner: Inner) -> Selection:
        start = (round.number - 1) * round.participants
        return Selection(tuple((start + k) % round.clients for k in range(round.participants)))


def small_data(clients: int, model: str) -> Task:
    """Return a task with two random samples per client and one step.

    It measures the store and not the training. The `wide` net has 11.2 million parameters,
    as ResNet-18, and trains in a hundredth of the time.
    """
    draw = torch.Generator().manual_seed(0)
    shape = (3, 32, 32) if model == "resnet18" else (784,)
    count = 2 * clients
    module = (
        "resnet18"
        if model == "resnet18"
        else nn.Sequential(nn.Linear(784, 14060), nn.ReLU(), nn.Linear(14060, 10))
    )
    train = Samples(
        torch.randn(count, *shape, generator=draw), torch.randint(10, (count,), generator=draw)
    )
    return make_task(
        Dataset("random", train, train[:2], 10),
        partition=Partition.from_sizes(np.arange(count), [2] * clients),
        model=module,
        training={"learning_rate": 0.001, "batch_size": 2},
    )


def peak_mib() -> float:
    """Return the peak memory of this process, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def median_ms(act: Callable[[int], object], clients: list[int]) -> float:
    """Return the median milliseconds of `act` over some clients."""
    seconds = []
    for client in clients:
        began = time.perf_counter()
        act(client)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def operations(
    store: ClientStore, folder: Path, row: torch.Tensor, some: list[int]
) -> list[dict[str, float | str]]:
    """Return milliseconds per client for the operations of a round.

    Plain copies, reads and writes of the same bytes are measured for comparison.
    """
    path = folder / "bare.bin"

    def write_bare(_: int) -> None:
        path.unlink(missing_ok=True)
        row.clone().numpy().tofile(path)

    def read(client: int) -> None:
        Memory(store, [client]).get("model", row.unsqueeze(0))

    def write(client: int) -> None:
        store.write(client, {"model": row.clone()})
        store.commit()

    def checkpoint(client: int) -> None:
        store.state()
        store.release()

    def write_and_checkpoint_bare(client: int) -> None:
        write_bare(client)
        flush(path)

    figures = [
        ("read a spilled model", read, lambda _: np.fromfile(path, np.float32)),
        ("write a model, spilling another", write, write_bare),
        ("checkpoint after one change", checkpoint, write_and_checkpoint_bare),
        ("checkpoint after none", checkpoint, lambda _: None),
    ]
    rows: list[dict[str, float | str]] = []
    write_bare(0)
    for name, act, bare in figures:
        took: list[float] = []
        for client in some:
            if name == "checkpoint after one change":
                write(client)
            took.append(median_ms(act, [client]))
        rows.append(
            {"operation": name, "ms": statistics.median(took), "bare_ms": median_ms(bare, some)}
        )
    path.unlink()
    return rows


def main() -> None:
    """Run, resume, check, time; exit with 1 if a model is wrong or memory exceeded the limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--model", choices=["wide", "resnet18"], default="wide")
    parser.add_argument("--budget-mb", type=float, default=400)
    parser.add_argument("--participants", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2, help="how often each client is met")
    parser.add_argument(
        "--limit-gib", type=float, default=4.0, help="peak memory that must not be passed"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the run goes (default: a temporary folder)"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    imported = peak_mib()
    task = small_data(chosen.clients, chosen.model)
    model_bytes = 4 * task.layout.size
    # The disk holds three generations of changed tensors between checkpoints at once.
    changed = min(chosen.clients, chosen.participants * 5)
    needed = model_bytes * (chosen.clients + 2 * changed + 10)
    folder = Path(tempfile.mkdtemp(prefix="fedloom-benchmark-", dir=chosen.folder))
    try:
        free = shutil.disk_usage(folder).free
        if free < 1.1 * needed:
            parser.error(
                f"needs {needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} GB are free: take "
                "fewer --clients"
            )
        rounds = chosen.turns * -(-chosen.clients // chosen.participants)
        schedule = Schedule(
            rounds, chosen.participants / chosen.clients, evaluate_every=rounds, checkpoint_every=5
        )
        engine = RowsEngine(task, memory_budget=int(chosen.budget_mb * 1e6))
        run = Federation(InTurn(PersonalModels()), task, engine, schedule, folder)
        began = time.perf_counter()
        run.run()
        seconds = time.perf_counter() - began
        peak = peak_mib()
        training = sum(timing["train_seconds"] for timing in run.timings)
        disk_bytes = sum(path.stat().st_size for path in (folder / "clients").iterdir())

        began = time.perf_counter()
        resumed = ClientStore(folder / "clients", int(chosen.budget_mb * 1e6))
        Checkpoints(folder, "").latest(
            rounds, lambda checkpoint: resumed.restore(checkpoint.clients)
        )
        restored = time.perf_counter() - began
        wrong = [
            client for client in range(chosen.clients) if not sound(resumed, engine.store, client)
        ]
        some = list(range(0, chosen.clients, max(1, chosen.clients // 20)))
        # The budget holds one model, so each write moves another model to disk and each read is
        # from disk.
        resumed.budget = 3 * model_bytes
        rows = operations(resumed, folder, task.initial, some)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell("Client store: milliseconds a client", rows)
    summary = {
        "clients": chosen.clients,
        "model_mb": model_bytes / 1e6,
        "models_gb": chosen.clients * model_bytes / 1e9,
        "budget_mb": chosen.budget_mb,
        "files_gb": disk_bytes / 1e9,
        "peak_gib": peak / 1024,
        "import_gib": imported / 1024,
        "seconds": seconds,
        "training_seconds": training,
        "restore_seconds": restored,
        "wrong_models": len(wrong),
    }
    tell(
        "Client store: a run whose clients all keep a model",
        [{"figure": name, "value": value} for name, value in summary.items()],
    )
    if wrong or peak > 1024 * chosen.limit_gib:
        raise SystemExit(1)


def sound(resumed: ClientStore, original: ClientStore, client: int) -> bool:
    """Return True if a new store has the same bits for the client as the run's own store."""
    restored, expected = resumed.read(client), original.read(client)
    names = {"model", "seen"}
    return restored.keys() == names == expected.keys() and all(
        torch.equal(restored[k], expected[k]) for k in names
    )


if __name__ == "__main__":
    main()
