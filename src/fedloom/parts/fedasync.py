from torch import Tensor

from fedloom.algorithm.method import algorithms
from fedloom.common.fields import NonNegative, Probability
from fedloom.parts.stale import StaleReplies


@algorithms.register("fedasync")
class FedAsync(StaleReplies):
    """FedAsync: every reply changes the model at once, with a smaller weight the staler it is.

    For the model w_i of a client that received the model tau versions ago:

        w <- (1 - a) w + a w_i,   a = alpha (1 + tau)^-`staleness`

    C clients train at the same time (see `Arrivals`). Clients train as in the inner method:
    `fedasync(fedprox)` has the paper's proximal term. `simulated_seconds` is the time on the clock.
    Source: Xie et al. 2019, "Asynchronous federated optimization", algorithm 1, polynomial
    weighting.
    Use it when each reply should change the model at once; the steps of `fedbuff` vary less.

    Args:
        alpha: Weight of a fresh reply (paper: 0.6).
        staleness: Exponent of the discount (paper: 0.5).
    """

    alpha: Probability = 0.6
    staleness: NonNegative = 0.5

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        return model + self.alpha * (1 + stale) ** -self.staleness * (rows - model)
