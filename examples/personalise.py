"""Train a model per client by FedALA's local aggregation around another method.

The example also measures fairness. Each client uses a quarter of its samples as its own test set.

    python examples/personalise.py
"""

from __future__ import annotations

import torch

import fedloom as fl

ROUNDS = 30
WIDTHS = (12, 12, 12, 8)


def main() -> None:
    torch.set_num_threads(1)
    task = fl.make_task(
        "digits",
        clients=20,
        partition="dirichlet(0.1, minimum=20)",
        model="mlp(hidden=[64])",
        training=fl.Training(learning_rate=0.05, epochs=2, batch_size=10),
        local_test=0.25,
        merge=True,
        seed=0,
    )
    print("accuracy on the clients' own test samples, %")
    print(
        f"{'method':30} {'global model':>12} {'own models':>12} {'worst tenth':>12} {'spread':>8}"
    )
    for method in ("fedavg", "fedprox(mu=0.1)", "ala(fedprox(mu=0.1))", "ditto"):
        result = fl.run(
            method, task, rounds=ROUNDS, participation=0.5, seed=0, personal_every=ROUNDS
        )
        last = result.history[-1]
        own = torch.tensor(result.federation.client_history[-1]["personal"]["accuracy"])
        worst = own.sort().values[: len(own) // 10].mean()
        figures = (
            last["client_accuracy"],
            last["personal_accuracy"],
            worst,
            last["personal_accuracy_std"],
        )
        print(
            f"{method:30} "
            + " ".join(
                f"{100 * float(figure):{width}.1f}"
                for figure, width in zip(figures, WIDTHS, strict=True)
            )
        )
    print(
        "\nThe first two are over all test samples; the worst tenth and the spread (standard "
        "deviation) are over clients."
    )


if __name__ == "__main__":
    main()
