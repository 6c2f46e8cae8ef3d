"""Compare your own method with two other methods.

Each client adds a share of its last displacement to its start: a momentum that never leaves the
client.

    python examples/own_method.py
"""

from __future__ import annotations

import torch

import fedloom as fl
from fedloom.algorithm import Message, algorithms
from fedloom.local.cohort import Cohort


@algorithms.register("heavy_clients")
class HeavyClients(fl.Algorithm):
    """FedAvg with clients that add a share of their last displacement to their start."""

    share: float = 0.3

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        start = inbox["model"]
        last = cohort.memory.get("displacement", torch.zeros_like(start))
        trained = cohort.fit(start + self.share * last).model
        cohort.memory["displacement"] = trained - start
        return {"model": trained}


def main() -> None:
    torch.set_num_threads(1)  # one thread is faster for a small model
    methods = ["fedavg", "heavy_clients", "stages(heavy_clients:15, fedmr)"]
    print(f"{'method':34} accuracy, % (2 seeds)   rounds to 70 %   kB up a round")
    for method in methods:
        results = []
        for seed in (0, 1):
            task = fl.make_task(
                "digits",
                clients=20,
                partition="dirichlet(0.3)",
                model="mlp(hidden=[64])",
                training=fl.Training(learning_rate=0.1, epochs=5),
                seed=seed,
            )
            results.append(
                fl.run(method, task, rounds=30, participation=0.5, seed=seed, evaluate_every=1)
            )
        accuracies = "  ".join(f"{100 * result.accuracy:5.1f}" for result in results)
        reached = "  ".join(f"{result.rounds_to(0.7) or 'never':>5}" for result in results)
        print(
            f"{method:34} {accuracies:>22} {reached:>16} "
            f"{results[0].history[-1]['bytes_up'] / 1e3:>15.0f}"
        )
    print("\nEvery method met the same clients, samples, initial models and selections.")


if __name__ == "__main__":
    main()
