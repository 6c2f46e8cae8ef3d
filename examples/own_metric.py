"""Evaluate a regression by your own metric.

The metric is the share of predictions of diabetes progression within 50 points.

python examples/own_metric.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fedloom as fl
from fedloom.objectives import Metric, Totals
from fedloom.objectives.regression import Regression


@dataclass(frozen=True)
class WithinReach(Regression):
    """A regression with the share of predictions within `reach` of the target as its metric."""

    reach: float = 0.65  # 50 points, in standard deviations of the target
    metric = Metric("within", "Within reach", higher_is_better=True, share=True)

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Return one value per sample, `[b]`; sums of them score clients and the test set."""
        statistics = super().statistics(outputs, targets)
        near = statistics["squared"].sqrt().le(self.reach).all(1)
        return {**statistics, "near": near.double()}

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(outputs), "near": ()}

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        return {**super().figures(totals), "within": totals["near"] / totals["samples"]}


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'method':20} {'within reach':>12} {'best':>8} {'RMSE':>8}")
    for method in ("indep", "fedavg", "fedprox(mu=0.1)", "fedmr"):
        task = fl.make_task(
            "diabetes",
            clients=8,
            partition="dirichlet(0.3)",
            model="mlp(hidden=[16])",
            objective=WithinReach(kind="huber"),
            training=fl.Training(learning_rate=0.05, epochs=2, batch_size=10),
        )
        result = fl.run(method, task, rounds=30, participation=0.5, evaluate_every=1)
        rmse = result.history[-1]["rmse"]
        print(
            f"{method:20} {100 * result.score:10.1f} % {100 * result.best_score:6.1f} % {rmse:8.2f}"
        )


if __name__ == "__main__":
    main()
