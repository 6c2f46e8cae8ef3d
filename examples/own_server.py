"""Write your own selection of clients and your own aggregation of replies.

python examples/own_server.py
"""

from __future__ import annotations

import torch

import fedloom as fl
from fedloom.algorithm import Replies, Selection, algorithms
from fedloom.common.round import Round


@algorithms.register("in_turn")
class InTurn(fl.Algorithm):
    """FedAvg with clients in turn: each round continues after the clients of the previous one."""

    def select(self, round: Round) -> Selection:
        first = (round.number - 1) * round.participants
        return Selection(tuple((first + k) % round.clients for k in range(round.participants)))


@algorithms.register("agreeing")
class Agreeing(fl.Algorithm):
    """FedAvg with larger weights for clients with updates d_i close to the mean update d.

    w <- w + sum_i p_i d_i, p_i ~ max(0, cos(d_i, d)).
    """

    def receive(self, round: Round, replies: Replies) -> None:
        start = self.state["model"]
        updates = replies["model"] - start  # [k, P]
        # [k]
        agreement = torch.cosine_similarity(updates, updates.mean(0, keepdim=True)).clamp_min(0)
        weights = agreement / agreement.sum().clamp_min(1e-12)
        self.state["model"] = start + weights @ updates


def main() -> None:
    torch.set_num_threads(1)
    task = fl.make_task(
        "digits",
        clients=20,
        partition="dirichlet(0.2)",
        model="mlp(hidden=[32])",
        training=fl.Training(learning_rate=0.1, epochs=3),
    )
    print(f"{'method':28} accuracy after 30 rounds, %")
    for method in ("fedavg", "in_turn", "agreeing", "stages(in_turn:15, fedmr)"):
        result = fl.run(method, task, rounds=30, participation=0.25)
        print(f"{method:28} {100 * result.accuracy:.1f}")


if __name__ == "__main__":
    main()
