import torch
from torch import Tensor

from fedloom.algorithm import Round, algorithms
from fedloom.algorithm.records import Aggregate, Plan, Replies
from fedloom.algorithms.qfedavg import ReportsLoss
from fedloom.algorithms.sharing import require_everybody
from fedloom.common.fields import NonNegative


@algorithms.register("afl")
class AFL(ReportsLoss):
    """Agnostic federated learning: w <- w_t + sum_i lambda_i (w_i - w_t), lambda <- Proj(lambda +
    rate F).

    Proj is the projection on the simplex, F_i the loss of w_t on all of client i's samples (0
    without a reply); lambda starts at 1/N. The global model is the mean of the iterates. With
    `training.steps = 1` w_t - w_i is a gradient step, as in the paper. Needs all clients in every
    round. Traffic: one additional number up.
    Source: Mohri et al. 2019, algorithm 1; local training of several steps as in easyFL.
    Use it with few clients, if the model must serve each of them well.

    Args:
        rate: Learning rate of lambda (easyFL: 0.01); 0 is FedAvg with equal weights.
        mean_of_iterates: Score the mean of the models of all rounds; `false` scores the last model.
    """

    rate: NonNegative = 0.01
    mean_of_iterates: bool = True

    needs = (require_everybody,)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        shares = torch.full(
            (plan.clients,), 1 / plan.clients, dtype=torch.float64, device=plan.initial.device
        )
        self.state |= {"shares": shares, "mean": plan.initial.clone()}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        rows = replies["model"]
        shares = self.state["shares"]
        clients = replies.clients.to(shares.device)
        step = shares[clients].to(rows) @ (rows - self.state["model"])
        losses = torch.zeros_like(shares).index_copy_(0, clients, replies["loss"].double())
        return replies.aggregate(
            mean={}, total={"step": step.unsqueeze(0), "losses": losses.unsqueeze(0)}
        )

    def update(self, round: Round, aggregate: Aggregate) -> None:
        model = self.state["model"] + aggregate.total["step"]
        shares = on_simplex(self.state["shares"] + self.rate * aggregate.total["losses"])
        mean = torch.lerp(self.state["mean"], model, 1 / (self.plan.passed(round.number) + 1))
        self.state |= {"model": model, "shares": shares, "mean": mean}

    def model(self) -> Tensor:
        return self.state["mean" if self.mean_of_iterates else "model"]


def on_simplex(values: Tensor) -> Tensor:
    """Return the nearest point of the simplex to `values [n]`: max(values - theta, 0), with theta
    such that the sum is 1.
    """
    ordered = values.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(
        1, len(values) + 1, dtype=values.dtype, device=values.device
    )
    index = (ordered > excess).sum().unsqueeze(0) - 1
    return (values - excess[index]).clamp_min(0)
