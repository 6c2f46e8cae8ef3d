from torch import Tensor

from fedloom.algorithm.method import algorithms
from fedloom.algorithm.records import Replies
from fedloom.common.fields import Positive
from fedloom.common.round import Round
from fedloom.parts.stale_updates import StaleUpdates


@algorithms.register("fedvarp")
class FedVARP(StaleUpdates):
    """FedVARP: w <- w_t + eta_g [y + (1/K) sum_i (D_i - y_i)], where the last updates y_j of all N
    clients have the mean y.

    D_i = w_i - w_t is the update of a client of the round, and y_i <- D_i afterwards. With
    participation of all clients this is FedAvg with equal weights. Clients keep y_i and upload w_i
    - y_i, so that traffic is FedAvg's. Another inner method changes the local training:
    `fedvarp(fedprox(mu=0.1))`. A round without a reply makes no step.
    Source: Jhunjhunwala et al. 2022, algorithm 1; the authors' code is not public.
    Use it when few of many skewed clients take part in a round, and each can store a vector as long
    as the model.

    Args:
        server_learning_rate: eta_g.
    """

    server_learning_rate: Positive = 1.0

    def step(self, round: Round, replies: Replies, change: Tensor) -> Tensor:
        return self.server_learning_rate * (self.mean_update(round) + change)
