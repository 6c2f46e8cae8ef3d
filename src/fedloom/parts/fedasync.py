from torch import Tensor

from fedloom.config.fields import NonNegative, Probability
from fedloom.method import algorithms
from fedloom.parts.stale import StaleReplies


@algorithms.register("fedasync")
class FedAsync(StaleReplies):
    """FedAsync: every reply changes the model at once, the less the staler it is.

    For the model w_i of a client that was sent one tau versions ago:

        w <- (1 - a) w + a w_i,   a = alpha (1 + tau)^-`staleness`

    C clients train at a time (see `Arrivals`). The client half is that of the inner method:
    `fedasync(fedprox)` keeps the paper's proximal term. Time is the clock's, `simulated_seconds`.
    Source: Xie et al. 2019, "Asynchronous federated optimization", algorithm 1, polynomial
    weighting.
    Use it when single clients are to count at once; `fedbuff` has less random steps.

    Args:
        alpha: Weight of a fresh reply (paper: 0.6).
        staleness: Exponent of the discount (paper: 0.5).
    """

    alpha: Probability = 0.6
    staleness: NonNegative = 0.5

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        return model + self.alpha * (1 + stale) ** -self.staleness * (rows - model)
