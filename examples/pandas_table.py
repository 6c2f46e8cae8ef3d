"""Train on a pandas table of wines; each vineyard is a client.

python examples/pandas_table.py
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_wine

import fedloom as fl


def wines() -> pd.DataFrame:
    """Return 178 wines with 13 measurements, the grape and a vineyard.

    Most vineyards grow mostly one grape.
    """
    data = load_wine(as_frame=True)
    frame = data.frame.drop(columns="target")
    frame["grape"] = np.array(["Barolo", "Grignolino", "Barbera"])[data.target]
    draw = np.random.default_rng(0)
    usual = draw.random(len(frame)) < 0.8
    frame["vineyard"] = np.where(
        usual, data.target * 3 + draw.integers(0, 3, len(frame)), draw.integers(0, 9, len(frame))
    )
    frame["soil"] = np.where(frame["vineyard"] % 2, "clay", "chalk")
    return frame


def main() -> None:
    torch.set_num_threads(1)
    frame = wines()
    task = fl.make_task(
        frame,
        target="grape",
        group="vineyard",
        clients=0,  # one client per vineyard
        partition="natural",
        model="mlp(hidden=[16])",
        training=fl.Training(learning_rate=0.05, epochs=3, batch_size=10),
    )
    names = ", ".join(task.dataset.class_names or ())
    print(
        f"{len(frame)} wines of {task.clients} vineyards; {task.dataset.spec.shape[0]} inputs; "
        f"{names}"
    )
    for method in ("fedavg", "fedprox(mu=0.1)", "scaffold", "fedmr"):
        result = fl.run(method, task, rounds=20, participation=0.4)
        print(f"{method:18} accuracy {100 * result.accuracy:.1f} %")


if __name__ == "__main__":
    main()
