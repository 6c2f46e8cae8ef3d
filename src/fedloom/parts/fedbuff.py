import torch
from torch import Tensor

from fedloom.config.fields import Count, NonNegative
from fedloom.method import algorithms
from fedloom.parts.stale import StaleReplies


@algorithms.register("fedbuff")
class FedBuff(StaleReplies):
    """FedBuff: buffered asynchronous aggregation. C clients train at a time, and the server steps
    whenever `k` have answered.

    With u_i = w_i - w_(t - tau) the update of a client that was sent a model tau versions ago, the
    inner method receives

        w_t + u_i (1 + tau_i)^-`staleness`

    for the models of these k clients: `fedbuff(fedavg, k=10)` steps by their mean,
    `fedbuff(fedavg(weighted=false))` is the paper's. Batch-norm statistics move from those of w_t
    towards the client's. k = C is the inner method, bit for bit. Time is the clock's,
    `simulated_seconds`; see `Arrivals` for rounds.
    Source: Nguyen et al. 2022, "Federated learning with buffered asynchronous aggregation",
    algorithm 1.
    Use it when a few slow clients hold up every round.

    Args:
        k: Replies in a step (paper: 10).
        staleness: Exponent of the discount (paper: 0.5).
    """

    k: Count = 10
    staleness: NonNegative = 0.5

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        weight = (1 + stale) ** -self.staleness
        trainable = self.plan.layout.trainable
        origin = torch.cat([sent[:, :trainable], model[:, trainable:].expand(len(rows), -1)], 1)
        return torch.where(stale == 0, rows, model + weight * (rows - origin))
