"""Train your own model on your own arrays with given clients, by two-stage FedMR.

The example also loads the saved model. Forty machines measure sixteen values each. Each machine has
sensors with their own offset and gain, and some states are rare on it.

    python examples/own_data.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedloom as fl

MACHINES, VALUES, STATES = 40, 16, 5


def measurements(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs `[n, 16]`, states `[n]` and the machine of each sample `[n]`."""
    draw, nature = np.random.default_rng(seed), np.random.default_rng(7)
    patterns = nature.normal(size=(STATES, VALUES))
    inputs, labels, machines = [], [], []
    for machine in range(MACHINES):
        gain, offset = nature.normal(1, 0.3, VALUES), nature.normal(0, 0.5, VALUES)
        frequent = nature.dirichlet(np.full(STATES, 0.4))
        count = int(draw.integers(40, 160))
        states = draw.choice(STATES, size=count, p=frequent)
        inputs.append((patterns[states] + draw.normal(0, 1.0, (count, VALUES))) * gain + offset)
        labels.append(states)
        machines.append(np.full(count, machine))
    return (
        np.concatenate(inputs).astype(np.float32),
        np.concatenate(labels),
        np.concatenate(machines),
    )


class Classifier(nn.Module):
    """Any module works; recombination moves each of its layers as a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(VALUES, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, STATES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))  # type: ignore[no-any-return]


def main() -> None:
    torch.set_num_threads(1)
    train, test = (
        fl.Samples(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(machine))
        for x, y, machine in (measurements(0), measurements(1))
    )
    dataset = fl.Dataset("machines", train, test, STATES)
    torch.manual_seed(0)
    task = fl.make_task(
        dataset,
        clients=0,  # one client per machine in the data
        partition="natural",
        model=Classifier(),
        training=fl.Training(learning_rate=0.05, epochs=2, batch_size=20),
    )
    print(f"{task.clients} machines, {len(train)} samples to train on, {len(test)} to test on")
    with tempfile.TemporaryDirectory() as folder:
        for number, method in enumerate(("fedavg", "fedmr", "stages(fedavg:15, fedmr)")):
            place = Path(folder) / str(number)
            result = fl.run(method, task, rounds=40, participation=0.25, directory=place)
            print(
                f"{method:26} accuracy {100 * result.accuracy:.1f} %, best "
                f"{100 * result.best_accuracy:.1f} %"
            )
        # a finished run is only read
        again = fl.run(method, task, rounds=40, participation=0.25, directory=place)
        model = fl.load_model(place, Classifier())
        print(
            "files of the last run:",
            ", ".join(sorted(path.name for path in place.glob("*.*") if path.name[0] != ".")),
        )
    with torch.no_grad():
        right = (model(test.inputs).argmax(1) == test.labels).float().mean()
    print(
        f"read from its file, the model has {100 * float(right):.1f} %, as the run had: "
        f"{100 * again.accuracy:.1f} %"
    )


if __name__ == "__main__":
    main()
