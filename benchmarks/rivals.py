"""Compare FedUmf with methods that use stale updates, and FedMR and FedMut with methods that look
for flat minima.

Each method is tuned by itself: it has the learning rates 0.03, 0.1 and 0.3 on samples that are held
out of its clients' training data, then trains with the best rate on all of them and is scored on
the test data, with three seeds and paired tests. Data are digits; with --mnist, the first 6,000
training images of MNIST. The models of the second part are also judged by the largest eigenvalue of
the Hessian of the training loss (Lanczos) and by the loss in random directions of half the
model's length. Folders of finished runs are continued.

    nice python benchmarks/rivals.py runs/rivals               # half an hour on two quiet cores
    nice python benchmarks/rivals.py runs/rivals --mnist FOLDER
    python benchmarks/rivals.py runs/rivals --only stale       # or flat
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn import functional as F

import fedloom as fl
from fedloom.data import Dataset
from fedloom.data.dataset import make_dataset
from outcome import append, finished_runs, tell

RATES = {"training.learning_rate": [0.03, 0.1, 0.3]}
SEEDS = range(3)
STALE = {
    "FedAvg": "fedavg(weighted=false)",
    "FedUmf": "umf(fedavg(weighted=false))",
    "FedVARP": "fedvarp",
    "MIFA": "mifa",
    "FedStale": "fedstale",
    "FedLaAvg": "fedlaavg",
    "SCAFFOLD": "scaffold",
}
FLAT = {
    "FedAvg": "fedavg",
    "FedMR": "fedmr",
    "FedAvg, then FedMR": "stages(fedavg:30, fedmr)",
    "FedMut": "fedmut",
    "FedSAM": "fedsam",
    "FedSpeed": "fedspeed",
    "FedGMT": "fedgmt",
    "FedSMOO": "fedsmoo",
    "FedLESAM": "fedlesam",
    "FedSWA": "fedswa",
}
ROUNDS = 60
EPOCHS = 5
RADIUS, DIRECTIONS = 0.5, 10
RECORD = Path(__file__).parent / "records" / "rivals.jsonl.gz"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--mnist", type=Path)
    options.add_argument("--only", choices=("stale", "flat"))
    given = options.parse_args()
    data = "digits" if given.mnist is None else "mnist"
    if given.only != "flat":
        for partition in ("dirichlet(0.1)", "dirichlet(0.5)"):
            for participation in (0.05, 0.2):
                stale_updates(given.folder, data, given.mnist, partition, participation)
    if given.only != "stale":
        for noise in (0.0, 0.4):
            flat_minima(given.folder, data, given.mnist, noise)


def stale_updates(
    folder: Path, data: str, path: Path | None, partition: str, participation: float
) -> None:
    """Compare over rounds and over bytes, and print a table."""
    make = partial(task_of, data, path, partition=partition)
    name = f"stale-{data}-{partition.strip('dirchlet()')}-{participation}"
    result = compared(folder / name, STALE, make, participation)
    rows = []
    curves = result.curves()
    budget = traffic(curves[curves["method"] == "FedAvg"]).groupby("seed")["bytes"].max().mean()
    for method in STALE:
        runs = traffic(curves[curves["method"] == method])
        last = runs[runs["round"] == ROUNDS]
        within = runs[runs["bytes"] <= budget].groupby("seed")["accuracy"].last()
        rows.append(
            {
                "method": method,
                "rate": rate_of(result, method),
                "accuracy": 100 * float(last["accuracy"].mean()),
                "deviation": 100 * float(last["accuracy"].std()),
                "MB": float(last["bytes"].mean()) / 1e6,
                "accuracy within FedAvg's bytes": 100 * float(within.mean()),
            }
        )
    tell(f"Stale updates: {data}, {partition}, {participation:.0%} of 40 clients", rows)
    record(name, rows)


def flat_minima(folder: Path, data: str, path: Path | None, noise: float) -> None:
    """Compare accuracy and sharpness with clean or wrong labels, and print a table."""
    make = partial(task_of, data, path, partition="dirichlet(0.3)", noise=noise, clients=20)
    name = f"flat-{data}-{noise}"
    result = compared(folder / name, FLAT, make, 0.5)
    rows = []
    for method in FLAT:
        runs = [run for run in result.runs if run.name["method"] == method]
        accuracy = [100 * float(run.summary.records[-1]["accuracy"]) for run in runs]
        sharp = [
            sharpness(fl.load(run.path).module, make(run.summary.seed), seed=0) for run in runs
        ]
        rows.append(
            {
                "method": method,
                "rate": rate_of(result, method),
                "accuracy": float(np.mean(accuracy)),
                "deviation": float(np.std(accuracy, ddof=1)),
                "largest eigenvalue": float(np.mean([value for value, _ in sharp])),
                "loss in random directions": float(np.mean([rise for _, rise in sharp])),
            }
        )
    tell(f"Flat minima: {data}, {noise:.0%} wrong labels", rows)
    record(name, rows)


def task_of(
    data: str,
    path: Path | None,
    seed: int,
    *,
    partition: str,
    noise: float = 0.0,
    clients: int = 40,
) -> fl.Task:
    """Return the task of a seed."""
    model = "mlp(hidden=[64, 64])" if data == "digits" else "mcmahan_2nn"
    return fl.make_task(
        dataset(data, path),
        clients=clients,
        partition=partition,
        model=model,
        seed=seed,
        label_noise=f"symmetric({noise})" if noise else "none",
        training={"epochs": EPOCHS, "batch_size": 50, "clip": 10.0},
    )


def dataset(data: str, path: Path | None) -> str | Dataset:
    """Return digits, or a part of MNIST."""
    if data == "digits":
        return data
    whole = make_dataset(f"mnist(path={str(path)!r})")
    return Dataset("mnist", whole.train[:6000], whole.test, mean=whole.mean, std=whole.std)


def compared(
    folder: Path, methods: Mapping[str, str], make: Any, participation: float
) -> fl.ComparisonResult:
    """Tune each method with the same budget, and compare them."""
    return fl.compare(
        methods,
        make,
        seeds=SEEDS,
        directory=folder,
        tune=RATES,
        rounds=ROUNDS,
        participation=participation,
        evaluate_every=2,
        quiet=True,
    )


def traffic(curves: Any) -> Any:
    """Return evaluated rounds with all bytes so far."""
    runs = curves.sort_values(["seed", "round"]).copy()
    sent = runs["bytes_down"] + runs["bytes_up"]
    runs["bytes"] = sent.groupby(runs["seed"]).cumsum()
    return runs[runs["accuracy"].notna()]


def rate_of(result: fl.ComparisonResult, method: str) -> str:
    """Return the chosen learning rate."""
    settings = result.method_settings()
    row = settings[settings.iloc[:, 0] == method]
    return str(row["learning_rate"].iloc[0])


def record(name: str, rows: list[dict[str, Any]]) -> None:
    """Add a table to the record, unless it is there."""
    known = {run["name"] for run in finished_runs(RECORD)}
    if name not in known:
        append(RECORD, {"name": name, "rows": rows})


def sharpness(module: nn.Module, task: fl.Task, seed: int) -> tuple[float, float]:
    """Return the largest eigenvalue of the Hessian of the training loss, and the mean rise of the
    loss in random directions of `RADIUS` times the model's length.
    """
    module = module.double().eval()
    weights = {name: p.detach() for name, p in module.named_parameters()}
    inputs = task.dataset.prepare(task.train.inputs).double()
    labels = task.train.labels

    def loss(values: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(module, values, (inputs,)), labels)

    flat = torch.cat([p.flatten() for p in weights.values()])

    def unflatten(vector: Tensor) -> dict[str, Tensor]:
        pieces = vector.split([p.numel() for p in weights.values()])
        shaped = zip(weights.items(), pieces, strict=True)
        return {name: piece.view_as(p) for (name, p), piece in shaped}

    def product(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        direction = unflatten(torch.from_numpy(np.ascontiguousarray(vector.reshape(-1))))
        change = jvp(grad(loss), (weights,), (direction,))[1]
        return torch.cat([t.flatten() for t in change.values()]).numpy()

    shape = (len(flat), len(flat))
    operator = LinearOperator(shape, matvec=product, dtype=np.float64)
    start = np.random.default_rng(seed).standard_normal(len(flat))
    (largest,) = eigsh(operator, k=1, which="LA", v0=start, tol=1e-3, return_eigenvectors=False)
    generator = torch.Generator().manual_seed(seed)
    base, rises = float(loss(weights)), []
    for _ in range(DIRECTIONS):
        direction = torch.randn(len(flat), generator=generator, dtype=torch.float64)
        moved = flat + RADIUS * flat.norm() * direction / direction.norm()
        rises.append(float(loss(unflatten(moved))) - base)
    return float(largest), float(np.mean(rises))


if __name__ == "__main__":
    main()
