"""Use your own optimizer, with a rate that rises over the rounds and falls within each.

python examples/own_optimizer.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import fedloom as fl


class SignDescent(torch.optim.Optimizer):
    """w <- w - rate sign(m), with m the running mean of the gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.001, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in group["params"]:
                mean = self.state[weights].setdefault("mean", torch.zeros_like(weights))
                mean.lerp_(weights.grad, 1 - group["beta"])
                weights.sub_(group["lr"] * mean.sign())


def main() -> None:
    torch.set_num_threads(1)
    settings = {
        "SGD": fl.Training(learning_rate=0.1, epochs=2),
        "sign descent": fl.Training(
            learning_rate=0.01, epochs=2, optimizer="own_optimizer:SignDescent"
        ),
        "... with schedules": fl.Training(
            learning_rate=0.01,
            epochs=2,
            optimizer="own_optimizer:SignDescent",
            optimizer_options={"beta": 0.5},
            schedule="warmup(3, then=cosine)",
            local_schedule="cosine(least=0.1)",
        ),
    }
    print("accuracy after 20 rounds, %")
    for name, training in settings.items():
        task = fl.make_task(
            "digits",
            clients=10,
            partition="dirichlet(0.5)",
            model="mlp(hidden=[32])",
            training=training,
        )
        result = fl.run("fedavg", task, rounds=20, participation=0.5)
        print(f"{name:20} {100 * result.accuracy:6.1f}")


if __name__ == "__main__":
    main()
