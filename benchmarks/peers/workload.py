"""The workloads of all frameworks: data, sizes and settings.

The module needs only NumPy, so that each environment can import it. Labels are a fixed random
linear map of the inputs, so a decreasing training loss proves that training took place. All
frameworks print the loss of their last global model on the same samples.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Workload:
    """`users` hold `samples` each; `cohort` of them train one epoch per round."""

    shape: tuple[int, ...]
    users: int
    samples: int
    cohort: int
    batch: int
    learning_rate: float
    momentum: float = 0.0

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs `[users, samples, ...]` (float32) and labels `[users, samples]` (int64)."""
        draw = np.random.default_rng(0)
        inputs = draw.standard_normal((self.users, self.samples, *self.shape), dtype=np.float32)
        teacher = draw.standard_normal((int(np.prod(self.shape)), 10), dtype=np.float32)
        labels = (inputs.reshape(-1, len(teacher)) @ teacher).argmax(1)
        return inputs, labels.reshape(self.users, self.samples)

    def probe(self, data: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return at most 2,000 samples of the first users, to score the last global model."""
        inputs, labels = data
        return inputs.reshape(-1, *self.shape)[:2000], labels.reshape(-1)[:2000]


WORKLOADS = {
    # 2NN on MNIST's shape, 100 clients, 10 per round
    "mlp": Workload((784,), 100, 600, 10, 10, 0.01),
    # two 5x5 convolutions and a layer of 512 on CIFAR-10's shape
    "cnn": Workload((3, 32, 32), 20, 500, 10, 50, 0.01, 0.9),
    # pfl-research's own CIFAR-10 setting: 1,000 users with 50 images each, 50 users per round
    "pfl": Workload((3, 32, 32), 1000, 50, 50, 10, 0.1),
    # PFLlib's defaults: 20 clients, batches of 10, its network for images of one channel
    "pfllib": Workload((1, 28, 28), 20, 300, 20, 10, 0.005),
}

METHODS = ("fedavg", "fedala")


def arguments(description: str) -> argparse.Namespace:
    """Parse the arguments of every framework's script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", choices=WORKLOADS, default="mlp")
    parser.add_argument(
        "--method", choices=METHODS, default="fedavg", help="fedala: blends the last layer"
    )
    parser.add_argument(
        "--source", type=Path, help="folder of a clone, for frameworks that are no package"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--warm-up", type=int, default=2, help="rounds at the start that are not counted"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="threads are the machine's cores over this"
    )
    parser.add_argument("--cores", type=int, default=2)
    return parser.parse_args()


def tell(
    framework: str, ends: list[float], began: float, warm_up: int, loss: float, **extra: Any
) -> None:
    """Print one line of JSON: seconds of each counted round and seconds until the first end.

    Both are computed from the end times of rounds.
    """
    rounds = np.diff(np.array(ends))[warm_up - 1 :]
    result = {
        "framework": framework,
        "seconds": float(np.median(rounds)),
        "fastest": float(rounds.min()),
        "first": ends[0] - began,
        "rounds": len(rounds),
        "loss": loss,
        **extra,
    }
    print(json.dumps(result), flush=True)


def clock() -> float:
    return time.perf_counter()
